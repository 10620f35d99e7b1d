"""`eagle3 export`: a drafter's folder in the format that an engine loads."""

from pathlib import Path
from typing import Annotated

import typer

from eagle3.cli.output import JsonFlag, answer
from eagle3.contract import Format


def export(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder, such as models/32000.")],
    to: Annotated[Format, typer.Option(help="plain for SGLang and vLLM; speculators for vLLM.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default FOLDER-FORMAT beside FOLDER.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(help="The target's folder, which the speculators format names."),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that engines draft per step (speculators format).")
    ] = 3,
    json: JsonFlag = False,
) -> None:
    """Write a drafter in an engine's format, after checking it.

    Example: eagle3 export models/32000 --to speculators --target data/target
    """
    # Here, since it needs torch, and `eagle3 --help` should not wait for it.
    from eagle3.export import export_drafter

    result = out or folder.with_name(f"{folder.name}-{to}")
    export_drafter(folder, result, to, target, draft_tokens)
    answer({"out": str(result), "format": to}, json, f"wrote {result} ({to} format)")
