"""A toy target and a writer that do something first: wait for each other, or break."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toy_store import ToyEngine, toy_header, toy_rows

from eagle3.engines.base import RowStates
from eagle3.store.writer import StateWriter

# Rows of 5 and 9 tokens, then one of 6 that lies across its end at 16.
CALLS_OF_SHARD_0 = 2
PATIENCE = 60.0
"""Seconds after which something that should have come is called missing."""


class WatchedWriter(StateWriter):
    """A writer that does something before each shard."""

    def __init__(self, path: Path, before: Callable[[int], None]) -> None:
        super().__init__(path, toy_header(), toy_rows())
        self.before = before

    def write(self, shard: int, *given: Any) -> None:
        self.before(shard)
        super().write(shard, *given)


class WatchedEngine(ToyEngine):
    """An engine that does something before each call."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.calls, self.before = 0, before

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        self.calls += 1
        self.before(self.calls)
        return super().states(rows)
