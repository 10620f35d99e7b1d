"""`eagle3 report`: the comparison of the last run on one screen."""

from pathlib import Path
from typing import Annotated

import typer

from eagle3.artifacts import Decision
from eagle3.cli.output import JsonFlag, answer


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of decision.json.")] = Decision.home,
    json: JsonFlag = False,
) -> None:
    """Show which draft vocabulary is faster, by how much, and how sure that is.

    Example: eagle3 report
    """
    # Late: it draws in matplotlib, which takes a second that other commands need not wait for.
    from eagle3.tables import summary_table

    decision = Decision.load(folder)
    answer(decision.model_dump(mode="json"), json, summary_table(decision))
