"""One worker of a distributed extraction: its own target, and the shards that it is told to make.

It runs in a process of Ray's, and knows nothing of Ray.
"""

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.artifacts import Split, TargetModel
from eagle3.config import TargetParams
from eagle3.engines.base import RowStates, Sampling, TargetEngine
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import EngineError, StorageError
from eagle3.shard_maker import ShardMaker
from eagle3.store.pointer import Where
from eagle3.store.writer import StateWriter


@dataclass(frozen=True)
class WorkerJob:
    """What every worker needs to know."""

    folder: Path
    """The project's, which every node must see at this path."""
    target: TargetModel
    params: TargetParams
    threads: int
    """That torch computes with: another number can move the last bit of a float32."""


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker says of itself when its target is loaded."""

    engine: str
    host: str
    process: int


class ExtractWorker:
    """Makes shards, one call each; of two calls at once, one has the target and one the disk."""

    def __init__(self) -> None:
        self._joining = threading.Lock()
        self._writers: dict[Where, StateWriter] = {}

    def open(self, job: WorkerJob) -> WorkerFacts:
        """Load the target; what cannot be done in a constructor, whose errors Ray garbles.

        Raises:
            EngineError: this node does not see the project's folder.
        """
        host = socket.gethostname()
        if not job.folder.is_dir():
            raise EngineError(
                f"Ray node {host} has no folder {job.folder}; put the project on a file system "
                "that every node has at this path, or set extract.ray_address to null"
            )
        os.chdir(job.folder)
        engine = TransformersEngine(job.target, job.params)
        self._maker = ShardMaker(OneRowAgain(engine), job.threads)
        return WorkerFacts(engine.name, host, os.getpid())

    def fill(self, where: Where, split: Split, shard: int, limit: int) -> None:
        """Make a shard of the store there, which may have been begun by a worker that died.

        It is durable when the call ends. `limit` is extract.max_nonfinite_rows. What all shards
        have together the driver counts.

        Raises:
            EngineError: this node does not see the store.
            StoreError: more rows of the shard have a state that is no number.
        """
        if isinstance(where, Path) and not where.is_dir():
            raise EngineError(
                f"Ray node {socket.gethostname()} does not see {where.absolute()}; put the project "
                "on a file system that the nodes share, or set extract.ray_address to null"
            )
        with self._joining:
            if where not in self._writers:
                self._writers[where] = self._join(where)
        self._maker.fill(self._writers[where], split, shard, limit)

    def _join(self, where: Where) -> StateWriter:
        try:
            return StateWriter.join(where)
        except StorageError as error:
            # The stage's own process has reached the bucket, so the node lacks something.
            raise EngineError(f"on Ray node {socket.gethostname()}: {error}") from error


class OneRowAgain:
    """An engine that need not run a row again for the next shard, if it lies across both.

    Such a row is a call alone; see `eagle3.extract.calls`.
    """

    def __init__(self, engine: TargetEngine) -> None:
        self.name, self._engine = engine.name, engine
        self._row: Sequence[int] = ()
        self._states: list[RowStates] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """As the engine does."""
        return self._engine.generate(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """As the engine gives them."""
        if len(rows) != 1:
            return self._engine.states(rows)
        if rows[0] != self._row:
            self._row, self._states = rows[0], self._engine.states(rows)
        return self._states
