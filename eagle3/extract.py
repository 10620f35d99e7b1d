"""The extract stage: the target reads the corpus once, and its hidden states are kept.

One engine in this process fills the stores (`extract_hidden_states`), or several workers elsewhere
do (`extract_by`, with eagle3.ray_workers): the bytes are the same, on the disk or in a bucket.

Shapes: n tokens of one shard, T tokens of one row, H target width.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.artifacts import HELD_OUT, SPLITS, Corpus, HiddenStates, Split, TargetModel
from eagle3.config import ExtractParams
from eagle3.engines.base import LAST, RowStates, TargetEngine
from eagle3.errors import StoreError
from eagle3.progress import Reporter
from eagle3.store.homes import StoreHomes
from eagle3.store.layout import Header
from eagle3.store.rows import Rows, load_rows, rows_sha256
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)

# Tokens that one call of the engine gets: some rows for a server to batch, and about ten seconds
# of SmolLM2 on two cores, between two steps of the progress.
TOKENS_A_CALL = 4096


def extract_hidden_states(
    target: TargetModel,
    corpus: Corpus,
    params: ExtractParams,
    engine: TargetEngine,
    out: Path,
    report: Reporter,
) -> HiddenStates:
    """Extract with one engine in this process; see `extract_by`."""

    def fill_stores(stores: Mapping[Split, StateWriter], progress: TokenProgress) -> None:
        for split, store in stores.items():
            fill(store, store.rows, engine, split, progress)

    return extract_by(target, corpus, params, engine.name, fill_stores, out, report)


def extract_by(
    target: TargetModel,
    corpus: Corpus,
    params: ExtractParams,
    engine: str,
    fill_stores: Callable[[Mapping[Split, StateWriter], "TokenProgress"], None],
    out: Path,
    report: Reporter,
) -> HiddenStates:
    """Run the target over every row and keep three aux states and the last one of each token.

    A killed run keeps its finished shards; the next one makes the others, and the bytes are those
    of a run that was never killed. `fill_stores` makes the shards that the stores lack; `engine`
    is its engine and version. Without `params.keep` the train split is left out (eagle3.stream).

    Raises:
        StoreError: a state is not a number, or kept work is damaged.
        ArtifactError: the corpus is damaged or of another target.
        StorageError: extract.store cannot be reached; finished shards are kept there.
        DiskFullError: too little room, said before anything is written, or none left after all;
            finished shards are kept.
    """
    corpus.require_made_from(target, Corpus.home)
    chosen = SPLITS if params.keep else HELD_OUT
    splits = {split: load_rows(Corpus.home / f"{split}.zarr") for split in chosen}
    made_from = {target.stage: target.fingerprint, corpus.stage: corpus.fingerprint}
    work = workspace("extract", {**made_from, "params": params.content, "engine": engine})
    result = work / "result"
    result.mkdir(exist_ok=True)
    headers = {
        f"{split}.zarr": _header(target, rows, params, split, engine)
        for split, rows in splits.items()
    }
    homes = StoreHomes(result, params.store, headers)
    homes.require_room()
    progress = TokenProgress(report, homes.sizes.tokens)
    with room_for("hidden states", work, homes.to_come):
        writers = {split: homes.start(f"{split}.zarr", rows) for split, rows in splits.items()}
        fill_stores(writers, progress)
        stores = {split: homes.finish(f"{split}.zarr") for split in splits}
        states = _record(target, made_from, params.keep, engine, stores)
        states.save(result)
        publish(result, out)
    shutil.rmtree(work)
    log.info(
        "hidden states of %d tokens: %.1f MiB, %.2f of their raw size",
        *(sum(states.tokens.values()), sum(states.bytes.values()) / 2**20, states.ratio),
    )
    return states


def longest_row() -> int:
    """Tokens of the corpus's longest row."""
    splits = (load_rows(Corpus.home / f"{split}.zarr") for split in SPLITS)
    return max(int(np.diff(rows.offsets_R1).max()) for rows in splits)


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


def fill(
    writer: StateWriter, rows: Rows, engine: TargetEngine, split: Split, progress: TokenProgress
) -> None:
    """Make the shards of a store that are not done; see `fill_shards`."""
    header, done = writer.header, writer.done
    progress.add(sum(_length(header, shard) for shard in done))
    fill_shards(writer, rows, engine, split, progress, set(range(header.num_shards)) - done)


def fill_shards(
    writer: StateWriter,
    rows: Rows,
    engine: TargetEngine,
    split: Split,
    progress: TokenProgress,
    missing: Set[int],
) -> None:
    """Make the shards `missing`, each row by one forward pass.

    A row that lies across two shards fills the end of one and the start of the next; if only one
    of them is missing, the row is run again for that one.

    Raises:
        StoreError: a state is not a finite number.
    """
    header, open_shards = writer.header, {}
    for call in calls(rows, header.shard_tokens, _rows_of(rows, header, missing)):
        if not missing & {shard for row in call for shard in _shards(rows, row, header)}:
            continue
        tokens = [rows.tokens_N[rows.span(row)].tolist() for row in call]
        started = time.monotonic()
        found = engine.states(tokens)
        progress.called(sum(map(len, tokens)), time.monotonic() - started)
        for row, states in zip(call, found, strict=True):
            for shard in _shards(rows, row, header):
                if shard not in missing:
                    continue
                if shard not in open_shards:
                    open_shards[shard] = writer.buffers(shard)
                _put(open_shards[shard], header.span(shard), rows.span(row), states)
                _require_finite(open_shards[shard], header.span(shard), rows, row, split)
                if rows.span(row).stop >= header.span(shard).stop:
                    writer.write(shard, *open_shards.pop(shard))
                    progress.add(_length(header, shard))
    assert not open_shards


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


def _put(
    shard: tuple[Tensor, Tensor], shard_span: slice, row_span: slice, states: RowStates
) -> None:
    """Copy what of a row lies in a shard, in the store's dtype."""
    start, stop = max(shard_span.start, row_span.start), min(shard_span.stop, row_span.stop)
    there = slice(start - shard_span.start, stop - shard_span.start)
    here = slice(start - row_span.start, stop - row_span.start)
    for buffer, values in zip(shard, (states.aux_T3H, states.last_TH), strict=True):
        assert values.shape == (row_span.stop - row_span.start, *buffer.shape[1:]), values.shape
        buffer[there] = values[here].to(buffer.dtype)


def _require_finite(
    shard: tuple[Tensor, Tensor], shard_span: slice, rows: Rows, row: int, split: Split
) -> None:
    """Look at the values that will be written: a float32 can be too large for bfloat16."""
    span = rows.span(row)
    start, stop = max(shard_span.start, span.start), min(shard_span.stop, span.stop)
    here = slice(start - shard_span.start, stop - shard_span.start)
    for name, buffer in zip(("aux", "last"), shard, strict=True):
        # One reduction says it for all; where is asked only when something is wrong.
        if bool(torch.isfinite(buffer[here]).all()):
            continue
        bad = (~torch.isfinite(buffer[here])).flatten(1).any(dim=1).nonzero()[0].item()
        place = start + int(bad) - span.start
        raise StoreError(
            f"the {name} states of {split} row {rows.row_ids[row]} are not finite from its token "
            f"{place} on (id {rows.tokens_N[span.start + place]}); set target.dtype and "
            "extract.state_dtype to float32, or leave the row's conversation out of corpus.sources"
        )


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


def _header(
    target: TargetModel, rows: Rows, params: ExtractParams, split: Split, engine: str
) -> Header:
    return Header(
        target=target.source,
        target_fingerprint=target.fingerprint,
        rows_sha256=rows_sha256(rows),
        tokens=rows.num_tokens,
        rows=len(rows),
        hidden_size=target.hidden_size,
        aux_layers=target.aux_layers,
        last=LAST,
        dtype=params.eval_state_dtype if split == "eval" else params.state_dtype,
        engine=engine,
        chunk_tokens=params.chunk_tokens,
        shard_tokens=params.shard_tokens,
    )


def _record(
    target: TargetModel,
    made_from: dict[str, str],
    keep: bool,
    engine: str,
    stores: dict[Split, StateStore],
) -> HiddenStates:
    return HiddenStates(
        made_from=made_from,
        keep=keep,
        aux_layers=target.aux_layers,
        hidden_size=target.hidden_size,
        tokens={split: store.header.tokens for split, store in stores.items()},
        dtype={split: store.header.dtype for split, store in stores.items()},
        engine=engine,
        sha256={split: store.sha256 for split, store in stores.items()},
        bytes={split: store.info.bytes for split, store in stores.items()},
        raw_bytes={split: store.info.raw_bytes for split, store in stores.items()},
    )
