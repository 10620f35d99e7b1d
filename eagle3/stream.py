"""Hidden states of the train split, made while training reads them (`extract.keep: false`).

The target runs in a thread beside the trainer and fills shards of whole rows in the order in which
the first epoch reads them; another thread writes each while the next is filled. A row is read when
its shards are sealed; a shard is deleted when the last row that needs it has been read. Which rows
a step reads never depends on time, and the states of a row on nothing but the row, so training is
the same as over stored states, bit for bit.

Shapes: n tokens of one row, H target width.
"""

import logging
import shutil
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

import numpy as np
from torch import Tensor

from eagle3.config import TrainParams
from eagle3.engines.base import RowStates, Sampling, TargetEngine
from eagle3.errors import DiskFullError, StoreError
from eagle3.fill import Filling, TokenProgress, make_shards
from eagle3.progress import Reporter
from eagle3.refusals import Refusals
from eagle3.store.layout import Header
from eagle3.store.packing import READ_DTYPES
from eagle3.store.refused import RowsRead, zeros_for_refused
from eagle3.store.rows import Rows, rows_sha256
from eagle3.store.size import expected_bytes, in_mib
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter
from eagle3.stream_plan import ShardNeeds, first_epoch, most_at_once, rows_to_read
from eagle3.work import room_for

log = logging.getLogger(__name__)

REFUSED_NOTE = "refused-rows.json"


class Stopped(Exception):
    """Nobody wants the states any more: the work that was under way ends here."""


@dataclass(frozen=True)
class Streaming:
    """How the train stage makes states itself."""

    engine: TargetEngine
    ahead_shards: int
    """Shards that the target may be ahead of training."""
    max_nonfinite_rows: int
    """Rows that may go without states."""


class StateStream:
    """The states of one training run; `start` begins, `close` ends the thread that makes them."""

    def __init__(
        self,
        path: Path,
        rows: Rows,
        like: Header,
        how: Streaming,
        params: TrainParams,
        report: Reporter,
    ) -> None:
        """Begin the store at `path`, or go on with the one that an earlier run left there.

        `rows` are the train split's, `like` describes a store of another split of the same corpus.

        Raises:
            StoreError: what is at `path` was made from something else, or is damaged.
        """
        self.rows, self._how, self._params, self._report = rows, how, params, report
        self._path = path
        self._lengths = np.diff(rows.offsets_R1).tolist()
        order = first_epoch(self._lengths, params)
        self._place_of = {row: place for place, row in enumerate(order)}
        self._laid = _in_order(rows, order)
        described = {
            "rows_sha256": rows_sha256(self._laid),
            "tokens": rows.num_tokens,
            "rows": len(rows),
        }
        self._header = like.model_copy(update=described)
        with room_for("hidden states", path.parent):
            self._writer = StateWriter(path, self._header, self._laid)
        self._store = StateStore.growing(path)
        # A shard is deleted with the names of its refused rows.
        self._refusals = Refusals(how.max_nonfinite_rows, path.with_name(REFUSED_NOTE))
        self._needs = ShardNeeds(())
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="make-states")
        self._making: Future[None] = Future()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-states")
        self._writing: Future[None] | None = None
        self._changed = Condition()
        # Replaced as a whole, before a shard with another one counts as sealed.
        self.refused = self._refusals.of("train")
        """Rows that have no states, of those that were made: by their tokens as they are laid."""
        # All below is read and written with `_changed` held.
        self._sealed: set[int] = set()
        self._asked = -1
        self._stopped = False

    def start(self, step: int) -> None:
        """Begin to make what the steps from `step` on read and is not there.

        Raises:
            DiskFullError: the shards that will lie on disk together are more than the disk has.
            StoreError: shards that are there have more refused rows than params allow.
        """
        reads = [self._shards(row) for row in rows_to_read(self._lengths, self._params, step)]
        self._needs = ShardNeeds(reads)
        there = self._writer.done
        for shard in there - set(self._needs.order):
            self._writer.clear(shard)
        self._sealed = there & set(self._needs.order)
        self._refuse(self._sealed)
        self._require_room(most_at_once(reads, self._how.ahead_shards, self._sealed))
        # In a copy of the context, where Prefect's loggers find the run that they belong to.
        self._making = self._pool.submit(copy_context().run, self._make)
        self._making.add_done_callback(lambda _: self._tell())

    def read_rows(self, spans: Sequence[slice]) -> RowsRead:
        """States of some rows, one behind the other, with zeros for those that were refused.

        Waits until they are there. Rows must be asked for in the order of training.

        Raises:
            StoreError: too many states are no numbers, or a shard was damaged after it was made.
            DiskFullError: the disk is full.
        """
        found = [self._read(span) for span in spans]
        header = self._header
        return zeros_for_refused(spans, found, header.hidden_size, READ_DTYPES[header.dtype])

    def _read(self, span: slice) -> tuple[Tensor, Tensor] | None:
        """States of the row that is these tokens: aux [n, 3, H] and last [n, H]."""
        row = int(np.searchsorted(self.rows.offsets_R1, span.start))
        assert self.rows.span(row) == span, "whole rows alone are read"
        shards, here = self._shards(row), self._laid.span(self._place_of[row])
        self._wait_for(shards)
        try:
            states = None if self.refused.at(here) else self._store.read(here.start, here.stop)
        except StoreError as error:
            for shard in shards:
                self._writer.clear(shard)
            raise StoreError(
                f"{str(error).partition(';')[0]}; it is deleted: run the same command again, "
                "which makes it anew"
            ) from error
        for shard in self._needs.read(shards):
            self._writer.clear(shard)
        return states

    def close(self) -> None:
        """End the threads, at the latest when target and disk have done what they are at."""
        with self._changed:
            self._stopped = True
        self._tell()
        self._pool.shutdown()
        self._disk.shutdown()

    def _make(self) -> None:
        """Make every shard that is needed and not there, in the order of first need."""
        wanted = [shard for shard in self._needs.order if shard not in self._sealed]
        spans = [self._header.span(shard) for shard in wanted]
        progress = TokenProgress(self._report, sum(span.stop - span.start for span in spans))
        engine = _WatchfulEngine(self._how.engine, self._require_wanted)
        for shard in wanted:
            self._wait_for_turn(shard)
            made: dict[int, Filling] = {}
            make_shards(self._writer, engine, progress, {shard}, made.__setitem__)
            # One at a time: the shard that is written and this one are all that is in memory.
            self._require_written(wait=True)
            work = copy_context().run
            self._writing = self._disk.submit(work, self._write, shard, made[shard], progress)
            self._writing.add_done_callback(lambda _: self._tell())
        self._require_written(wait=True)

    def _write(self, shard: int, filled: Filling, progress: TokenProgress) -> None:
        """Write a shard, and let training read it."""
        self._refusals.add("train", filled.refused)
        with room_for("hidden states", self._path.parent):
            self._writer.write(shard, filled.aux_n3H, filled.last_nH, filled.refused)
        self._refuse({shard})
        with self._changed:
            self._sealed.add(shard)
        self._tell()
        progress.add(len(filled.last_nH))

    def _require_written(self, wait: bool) -> None:
        """What went wrong when the last shard was written is raised here."""
        if self._writing and (wait or self._writing.done()):
            self._writing.result()

    def _refuse(self, shards: Set[int]) -> None:
        """Know the rows that finished shards name as refused."""
        self._refusals.add("train", self._writer.refused(shards))
        self.refused = self._refusals.of("train")

    def _wait_for(self, shards: range) -> None:
        """Wait for shards, and let the target go on to those that follow."""
        with self._changed:
            self._asked = max(self._asked, self._needs.turn(shards))
            self._changed.notify_all()
            while not self._sealed.issuperset(shards):
                if self._stopped:
                    raise Stopped
                if self._making.done():
                    self._making.result()
                    raise AssertionError(f"shards {shards} were not made")
                self._changed.wait()

    def _wait_for_turn(self, shard: int) -> None:
        """Wait until training has come near enough to a shard."""
        turn = self._needs.turn(range(shard, shard + 1))
        with self._changed:
            while turn > self._asked + self._how.ahead_shards:
                self._require_wanted()
                # Training may wait for the very shard whose writing failed.
                self._require_written(wait=False)
                self._changed.wait()

    def _require_wanted(self) -> None:
        if self._stopped:
            raise Stopped

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _shards(self, row: int) -> range:
        """The shards that a row of the corpus lies in."""
        span = self._laid.span(self._place_of[row])
        size = self._header.shard_tokens
        return range(span.start // size, (span.stop - 1) // size + 1)

    def _require_room(self, most: int) -> None:
        header = self._header
        a_shard = expected_bytes(header) / header.tokens * header.shard_tokens
        missing = most - len(self._sealed)
        free = shutil.disk_usage(self._path).free
        log.info(
            "hidden states of %d of %d shards are made while training reads them, at most %d on "
            "disk at a time (about %s); %s free",
            *(len(self._needs.order), header.num_shards, most, in_mib(most * a_shard)),
            in_mib(free),
        )
        if missing * a_shard > free:
            raise DiskFullError(
                f"{missing} shards of {header.shard_tokens} tokens need about "
                f"{in_mib(missing * a_shard)} in {self._path.parent}, which has "
                f"{in_mib(free)} free; make room, or lower extract.ahead_shards "
                f"({self._how.ahead_shards}) or extract.shard_tokens (a second epoch keeps all "
                "shards: lower train.total_steps), then run the same command again"
            )


class _WatchfulEngine:
    """An engine that asks before each call, and remembers a row that lies across two shards."""

    def __init__(self, engine: TargetEngine, ask: Callable[[], None]) -> None:
        self.name, self._engine, self._ask = engine.name, engine, ask
        self._row: list[int] = []
        self._states: list[RowStates] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """As the engine does."""
        return self._engine.generate(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """As the engine gives; the last row that came alone costs nothing when it comes again."""
        self._ask()
        alone = list(rows[0]) if len(rows) == 1 else []
        if alone and alone == self._row:
            return self._states
        found = self._engine.states(rows)
        if alone:
            self._row, self._states = alone, found
        return found


def _in_order(rows: Rows, order: Sequence[int]) -> Rows:
    """The same rows, laid end to end in another order."""
    spans = [rows.span(row) for row in order]
    lengths = [span.stop - span.start for span in spans]
    return Rows(
        tokens_N=np.concatenate([rows.tokens_N[span] for span in spans]),
        loss_mask_N=np.concatenate([rows.loss_mask_N[span] for span in spans]),
        offsets_R1=np.cumsum([0, *lengths], dtype=np.int64),
        domains=tuple(rows.domains[row] for row in order),
        row_ids=tuple(rows.row_ids[row] for row in order),
    )
