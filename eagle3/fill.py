"""Filling the shards of a store with the target's states: which rows in one call, and which shard.

The target is not kept waiting: while it makes the states of a call, those of the call before are
put into their shards, and a shard that is full is packed and written.

Shapes: n tokens of one shard, T tokens of one row, H target width.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.artifacts import Split
from eagle3.engines.base import RowStates, StatesEngine
from eagle3.progress import Reporter
from eagle3.refusals import Refusals
from eagle3.store.layout import Header
from eagle3.store.refused import Refused, in_write_dtype
from eagle3.store.rows import Rows
from eagle3.store.writer import StateWriter

log = logging.getLogger(__name__)

# Tokens that one call of the engine gets: some rows for a server to batch, and about ten seconds
# of SmolLM2 on two cores, between two steps of the progress.
TOKENS_A_CALL = 4096


class TokenProgress:
    """Tokens done, of all splits together, and how long the rest will take."""

    def __init__(self, report: Reporter, total: int) -> None:
        self._report, self._total, self._done = report, total, 0
        self._estimated = False

    def add(self, tokens: int) -> None:
        """So many more are finished."""
        self._done += tokens
        self._report.progress("hidden states", self._done, self._total, "tokens")

    def called(self, tokens: int, seconds: float) -> None:
        """The target has read so many tokens; the first call, before any is written, tells."""
        if self._estimated:
            return
        self._estimated = True
        pace, left = tokens / max(seconds, 1e-9), self._total - self._done
        log.info(
            "states come at %.0f tokens a second: about %.0f s for the %d tokens still to come",
            *(pace, left / pace, left),
        )


@dataclass(frozen=True)
class Filling:
    """A shard before it is written."""

    aux_n3H: Tensor
    last_nH: Tensor
    refused: list[Refused]


class WriteBehind:
    """Writes one shard at a time in a thread of its own; at its end all of them are written.

    An error of the thread comes with the next shard, or at the end.
    """

    def __init__(self, writer: StateWriter, progress: TokenProgress) -> None:
        self._writer, self._progress = writer, progress
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write-shard")
        self._under_way: tuple[int, Future[None]] | None = None

    def __enter__(self) -> "WriteBehind":
        return self

    def write(self, shard: int, filled: Filling) -> None:
        """As `StateWriter.write`, which may still be at it afterwards: leave the tensors alone."""
        # One at a time: this shard and the next one are all that is held in memory.
        self._finish()
        given = (filled.aux_n3H, filled.last_nH, filled.refused)
        self._under_way = (shard, self._pool.submit(self._writer.write, shard, *given))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whatever went wrong elsewhere, the shard under way is whole.
        self._pool.shutdown()
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        if self._under_way is None:
            return
        (shard, written), self._under_way = self._under_way, None
        written.result()
        self._progress.add(_length(self._writer.header, shard))


def fill(
    writer: StateWriter,
    engine: StatesEngine,
    split: Split,
    progress: TokenProgress,
    refusals: Refusals,
) -> None:
    """Make the shards of a store that are not done; see `fill_shards`."""
    header, done = writer.header, writer.done
    progress.add(sum(_length(header, shard) for shard in done))
    missing = set(range(header.num_shards)) - done
    fill_shards(writer, engine, split, progress, refusals, missing)


def fill_shards(
    writer: StateWriter,
    engine: StatesEngine,
    split: Split,
    progress: TokenProgress,
    refusals: Refusals,
    missing: Set[int],
) -> None:
    """Make the shards `missing` and write them; see `make_shards`.

    Raises:
        StoreError: more rows have a state that is no number than `refusals` allows; the shard that
            has one too many is not written.
    """
    with WriteBehind(writer, progress) as behind:

        def take(shard: int, filled: Filling) -> None:
            refusals.add(split, filled.refused)
            behind.write(shard, filled)

        make_shards(writer, engine, progress, missing, take)


def make_shards(
    writer: StateWriter,
    engine: StatesEngine,
    progress: TokenProgress,
    missing: Set[int],
    take: Callable[[int, Filling], None],
) -> None:
    """Make the shards `missing`, each row by one forward pass, and hand them over to be written.

    A row that lies across two shards fills the end of one and the start of the next; if only one
    of them is missing, the row is run again for that one. A row is refused as a whole: by both.

    Args:
        writer: of the store.
        engine: the target.
        progress: told how fast the target is.
        missing: shards.
        take: called with each shard when it is full, in a thread of its own, one after the other.
            An error of it comes with the next call of the target, or at the end.
    """
    rows, header = writer.rows, writer.header
    filling: dict[int, Filling] = {}

    def put(call: list[int], found: Sequence[RowStates]) -> None:
        for row, states in zip(call, found, strict=True):
            for shard, filled in _put_row(filling, writer, missing, row, states):
                take(shard, filled)

    # What is put when the target fails or is stopped is put to its end.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="put-states") as pool:
        under_way: Future[None] | None = None
        for call in calls(rows, header.shard_tokens, _rows_of(rows, header, missing)):
            if not missing & {shard for row in call for shard in _shards(rows, row, header)}:
                continue
            tokens = [rows.tokens_N[rows.span(row)].tolist() for row in call]
            started = time.monotonic()
            found = engine.states(tokens)
            progress.called(sum(map(len, tokens)), time.monotonic() - started)
            if under_way:
                under_way.result()
            # In a copy of the context, where Prefect's loggers find the run that they belong to.
            under_way = pool.submit(copy_context().run, put, call, found)
        if under_way:
            under_way.result()
    assert not filling


def calls(rows: Rows, shard_tokens: int, among: range | None = None) -> Iterator[list[int]]:
    """Group the rows into calls of the engine: a function of the corpus and the params alone.

    So a resumed run makes the same calls as one that was never killed, and an engine that batches
    gives the same bits. A row across shards is a call alone: it is the one that may be needed
    for a shard whose neighbours are done. No call holds rows that start in two shards, so the calls
    for a shard need a look at its own rows (`among`) and no others.
    """
    call: list[int] = []
    tokens = 0
    for row in range(len(rows)) if among is None else among:
        span = rows.span(row)
        across = span.start // shard_tokens != (span.stop - 1) // shard_tokens
        starts_shard = span.start % shard_tokens == 0
        if call and (across or starts_shard or tokens + span.stop - span.start > TOKENS_A_CALL):
            yield call
            call, tokens = [], 0
        if across:
            yield [row]
            continue
        call.append(row)
        tokens += span.stop - span.start
    if call:
        yield call


def _judged(
    header: Header, rows: Rows, row: int, states: RowStates
) -> tuple[RowStates, list[Refused]]:
    """A row's states in the dtype that a writer takes; zeros and its name if one is no number."""
    aux_T3H, last_TH, bad = in_write_dtype(header.dtype, states.aux_T3H, states.last_TH)
    if bad is None:
        return RowStates(aux_T3H, last_TH), []
    span, (token, state) = rows.span(row), bad
    refused = Refused(
        row=rows.row_ids[row],
        start=span.start,
        stop=span.stop,
        token=token,
        layer=(*header.aux_layers, None)[state],
    )
    return RowStates(torch.zeros_like(aux_T3H), torch.zeros_like(last_TH)), [refused]


def _put_row(
    filling: dict[int, Filling], writer: StateWriter, missing: Set[int], row: int, states: RowStates
) -> Iterator[tuple[int, Filling]]:
    """Put a row where it belongs; take out and give the shards that are full by it."""
    rows, header = writer.rows, writer.header
    states, refused = _judged(header, rows, row, states)
    for shard in _shards(rows, row, header):
        if shard not in missing:
            continue
        if shard not in filling:
            filling[shard] = Filling(*writer.buffers(shard), [])
        here = filling[shard]
        _put((here.aux_n3H, here.last_nH), header.span(shard), rows.span(row), states)
        here.refused.extend(refused)
        if rows.span(row).stop >= header.span(shard).stop:
            yield shard, filling.pop(shard)


def _put(
    shard: tuple[Tensor, Tensor], shard_span: slice, row_span: slice, states: RowStates
) -> None:
    """Copy what of a row lies in a shard."""
    start, stop = max(shard_span.start, row_span.start), min(shard_span.stop, row_span.stop)
    there = slice(start - shard_span.start, stop - shard_span.start)
    here = slice(start - row_span.start, stop - row_span.start)
    for buffer, values in zip(shard, (states.aux_T3H, states.last_TH), strict=True):
        assert values.shape == (row_span.stop - row_span.start, *buffer.shape[1:]), values.shape
        buffer[there] = values[here]


def _shards(rows: Rows, row: int, header: Header) -> range:
    span = rows.span(row)
    return range(span.start // header.shard_tokens, (span.stop - 1) // header.shard_tokens + 1)


def _length(header: Header, shard: int) -> int:
    span = header.span(shard)
    return span.stop - span.start


def _rows_of(rows: Rows, header: Header, shards: Set[int]) -> range:
    """Rows from the first that has tokens in one of the shards to the last."""
    if not shards:
        return range(0)
    start, stop = header.span(min(shards)).start, header.span(max(shards)).stop
    first = int(np.searchsorted(rows.offsets_R1, start, side="right")) - 1
    return range(first, int(np.searchsorted(rows.offsets_R1, stop, side="left")))
