"""How far long work is: a bar on a terminal, lines at a readable pace elsewhere.

The library reports to a `Reporter`; the stages' own (tasks/) adds MLflow and Prefect to it.
"""

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class Reporter(Protocol):
    """Where long work says what it has done."""

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` units of the work called `label` are finished."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Figures of the work at a step, for a curve."""


class SilentReporter:
    """For a process that works for another, which reports for both."""

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """Nothing."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Nothing."""


class ConsoleReporter:
    """A bar on standard error when it is a terminal, log lines otherwise. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._last_line: dict[str, float] = {}

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """Move the bar, or write a line if the last one is old enough or the work is over."""
        self._started.setdefault(label, time.monotonic())
        if sys.stderr.isatty():
            with self._lock:
                self._move_bar(label, done, total, unit)
            return
        now = time.monotonic()
        if done < total and now - self._last_line.get(label, 0.0) < SECONDS_BETWEEN_LINES:
            return
        self._last_line[label] = now
        seconds = now - self._started[label]
        share = 100 * done / max(total, 1)
        log.info("%s: %d of %d %s (%.0f%%), %.0f s", label, done, total, unit, share, seconds)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Write the figures as one line."""
        log.info(
            "step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        )

    def _move_bar(self, label: str, done: int, total: int, unit: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
        if label not in self._tasks:
            self._tasks[label] = self._bar.add_task(label, total=total, unit=unit)
        self._bar.update(self._tasks[label], completed=done, total=total)
        if self._bar.finished:
            self._bar.stop()
            self._bar, self._tasks = None, {}
