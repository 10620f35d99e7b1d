"""`eagle3 check`: does a drafter's folder keep the whole contract that engines rely on?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from eagle3.cli.output import JsonFlag, answer
from eagle3.fault import Fault


def check(
    folder: Annotated[Path, typer.Argument(help="A drafter's folder, ours or another trainer's.")],
    target: Annotated[
        Path | None,
        typer.Option(help="The target's folder: sizes, layer ids and head are proven against it."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Name every line of the checkpoint contract that a drafter breaks; exit 1 if there is one.

    Example: eagle3 check models/32000 --target data/target
    """
    # Here, since it needs torch, and `eagle3 --help` should not wait for it.
    from eagle3.check import check_drafter

    faults = check_drafter(folder, target)
    facts = {"ok": not faults, "faults": [asdict(fault) for fault in faults]}
    answer(facts, json, _table(folder, faults) if faults else f"{folder} keeps the contract")
    if faults:
        raise typer.Exit(1)


def _table(folder: Path, faults: tuple[Fault, ...]) -> Table:
    table = Table(title=f"{folder}: {len(faults)} fault(s)")
    for column in ("where", "what", "fix"):
        table.add_column(column)
    for fault in faults:
        table.add_row(
            *(Text(text, overflow="fold") for text in (fault.where, fault.what, fault.fix))
        )
    return table
