"""How every command answers: JSON or tables on standard output, all else on standard error."""

import json
import logging
import sys
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

WIDTH_OF_NO_TERMINAL = 120


def answer(facts: dict[str, Any], as_json: bool, *tables: RenderableType) -> None:
    """Write the answer: `facts` for programs, `tables` for people."""
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_NO_TERMINAL, highlight=False)
    for table in tables:
        console.print(table)


def log_to_stderr() -> None:
    """Send the library's log lines where they cannot mix with an answer."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # It says at every start where it found credentials.
    logging.getLogger("aiobotocore").setLevel(logging.WARNING)
