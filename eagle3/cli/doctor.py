"""`eagle3 doctor`: is this machine ready?"""

import os
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from eagle3.cli.output import JsonFlag, answer
from eagle3.doctor import examine

COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


def doctor(json: JsonFlag = False) -> None:
    """Check Python, pins, PATH, disk, DVC's cache, MLflow and Prefect; exit 1 if a run would fail.

    Example: eagle3 doctor
    """
    findings = examine(Path.cwd(), os.environ)
    ready = all(finding.state != "fault" for finding in findings)
    table = Table(title="ready" if ready else "not ready")
    for column in ("check", "state", "found", "what mends it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=COLOURS[finding.state])
        table.add_row(finding.check, state, Text(finding.found), Text(finding.fix))
    answer({"ok": ready, "findings": [asdict(finding) for finding in findings]}, json, table)
    if not ready:
        raise typer.Exit(1)
