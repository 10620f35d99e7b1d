"""The extract stage: the target reads the corpus once, and its hidden states are kept.

One engine in this process fills the stores (`extract_hidden_states`), or several workers elsewhere
do (`extract_by`, with eagle3.ray_workers): the bytes are the same, on the disk or in a bucket.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from eagle3.artifacts import HELD_OUT, SPLITS, Corpus, HiddenStates, Split, TargetModel
from eagle3.config import ExtractParams
from eagle3.engines.base import LAST, TargetEngine
from eagle3.fill import TokenProgress, fill
from eagle3.progress import Reporter
from eagle3.refusals import Refusals
from eagle3.store.homes import StoreHomes
from eagle3.store.layout import Header
from eagle3.store.rows import Rows, load_rows, rows_sha256
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)


def extract_hidden_states(
    target: TargetModel,
    corpus: Corpus,
    params: ExtractParams,
    engine: TargetEngine,
    out: Path,
    report: Reporter,
) -> HiddenStates:
    """Extract with one engine in this process; see `extract_by`."""

    def fill_stores(
        stores: Mapping[Split, StateWriter], progress: TokenProgress, refusals: Refusals
    ) -> None:
        for split, store in stores.items():
            fill(store, engine, split, progress, refusals)

    return extract_by(target, corpus, params, engine.name, fill_stores, out, report)


def extract_by(
    target: TargetModel,
    corpus: Corpus,
    params: ExtractParams,
    engine: str,
    fill_stores: Callable[[Mapping[Split, StateWriter], TokenProgress, Refusals], None],
    out: Path,
    report: Reporter,
) -> HiddenStates:
    """Run the target over every row and keep three aux states and the last one of each token.

    A killed run keeps its finished shards; the next one makes the others, and the bytes are those
    of a run that was never killed. `fill_stores` makes the shards that the stores lack; `engine`
    is its engine and version. Without `params.keep` the train split is left out (eagle3.stream).

    Raises:
        StoreError: more rows have a state that is no number than params allow, or kept work is
            damaged.
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
    refusals = Refusals(params.max_nonfinite_rows)
    with room_for("hidden states", work, homes.to_come):
        writers = {split: homes.start(f"{split}.zarr", rows) for split, rows in splits.items()}
        for split, writer in writers.items():
            refusals.add(split, writer.refused(writer.done))
        fill_stores(writers, progress, refusals)
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
        refused_rows={split: len(store.refused) for split, store in stores.items()},
        bytes={split: store.info.bytes for split, store in stores.items()},
        raw_bytes={split: store.info.raw_bytes for split, store in stores.items()},
    )
