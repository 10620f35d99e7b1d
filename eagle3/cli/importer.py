"""`eagle3 import`: a drafter that others published, converted into the plain format."""

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.output import JsonFlag, answer
from eagle3.errors import ParamsError


def import_(
    folder: Annotated[Path, typer.Argument(help="The folder as published.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    target: Annotated[
        Path | None,
        typer.Option(help="The target's folder: settles layer ids and the embedding."),
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(help="Aux layers as counts of layers that have run, such as 2,15,27."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Convert another trainer's drafter into the plain format; refuse pickles that could run code.

    Example: eagle3 import downloads/drafter models/theirs --target data/target
    """
    # Here, since it needs torch, and `eagle3 --help` should not wait for it.
    from eagle3.importer import import_drafter

    changes = import_drafter(folder, out, target, None if layer_ids is None else _ids(layer_ids))
    answer(
        {"out": str(out), "changes": changes}, json, f"wrote {out}", *(f"  {c}" for c in changes)
    )


def _ids(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ParamsError(
            f"--layer-ids {text!r} is no list of whole numbers; write such as 2,15,27"
        )
    return tuple(int(part) for part in parts)
