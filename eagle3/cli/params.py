"""`eagle3 params`: what a drafter trains and what it holds frozen."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from eagle3.cli.output import JsonFlag, answer
from eagle3.config import PARAMS_FILE, load_params, parse_size
from eagle3.counts import ParameterTable, parameter_table
from eagle3.errors import ParamsError

PRESETS = Path("presets")


def params(
    draft_vocab: Annotated[str, typer.Option(help="A number of tokens, or full.")],
    preset: Annotated[
        str | None, typer.Option(help="Name of a file in presets/; without it, params.yaml.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Count a drafter's parameters, tensor by tensor, without allocating any.

    Example: eagle3 params --preset kimi-k2.5 --draft-vocab 32000
    """
    path = params_file(preset)
    table = parameter_table(load_params(path), parse_size(draft_vocab))
    facts = {
        "params": str(path),
        "draft_vocab": table.draft_vocab,
        "trainable": table.trainable,
        "frozen": table.frozen,
        "total": table.total,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "parameters": tensor.parameters,
                "trainable": tensor.trainable,
            }
            for tensor in table.tensors
        ],
    }
    answer(facts, json, _for_people(table, path))


def params_file(preset: str | None) -> Path:
    """The file of a preset, or the project's own without one.

    Raises:
        ParamsError: there is no such preset.
    """
    if preset is None:
        return PARAMS_FILE
    path = PRESETS / f"{preset}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in PRESETS.glob("*.yaml")))
        raise ParamsError(
            f"--preset {preset}: there is no {path}; "
            + (f"known are {known}" if known else "run this in the project's folder")
        )
    return path


def _for_people(table: ParameterTable, path: Path) -> Table:
    shown = Table(title=f"Drafter of {path}, draft vocabulary {table.draft_vocab:,}")
    shown.add_column("tensor")
    shown.add_column("shape", justify="right")
    shown.add_column("trainable", justify="right")
    shown.add_column("frozen", justify="right")
    for tensor in table.tensors:
        count = f"{tensor.parameters:,}"
        cells = (count, "") if tensor.trainable else ("", count)
        shown.add_row(tensor.name, " x ".join(f"{size:,}" for size in tensor.shape), *cells)
    shown.add_section()
    shown.add_row("sum", "", f"{table.trainable:,}", f"{table.frozen:,}")
    shown.add_row("in all", f"{table.total:,}")
    return shown
