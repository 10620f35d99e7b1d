"""`eagle3 inspect`: what an artifact is, holds and was made from."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eagle3.cli.output import JsonFlag, answer
from eagle3.lineage import Description, Source, describe


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A stage's folder, its record, a store or a drafter.")
    ],
    json: JsonFlag = False,
) -> None:
    """Say what a path is, what it holds, and what it was made from.

    Example: eagle3 inspect models/32000
    """
    description = describe(path)
    made_from = [_for_programs(source) for source in description.made_from]
    facts = {
        "path": str(path),
        "kind": description.kind,
        "fingerprint": description.fingerprint,
        "holds": description.holds,
        "made_from": made_from,
    }
    tables = [_holds(description)]
    if made_from:
        tables.append(_chain(description))
    answer(facts, json, *tables)


def _for_programs(source: Source) -> dict[str, str]:
    return {**asdict(source), "home": str(source.home)}


def _holds(description: Description) -> Table:
    title = f"{description.path}: {description.kind}"
    if description.fingerprint:
        title += f", fingerprint {description.fingerprint[:12]}"
    table = Table(title=title, show_header=False)
    for name, value in _flat(description.holds):
        table.add_row(name, Text(str(value), overflow="fold"))
    return table


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _chain(description: Description) -> Table:
    table = Table(title="made from")
    for column in ("stage", "fingerprint", "there now", "folder"):
        table.add_column(column)
    for source in description.made_from:
        table.add_row(source.stage, source.fingerprint[:12], source.state, str(source.home))
    return table
