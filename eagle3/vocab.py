"""The draft vocabulary: the most frequent target tokens, or those of a published drafter.

Shapes: V target vocabulary, D draft vocabulary.
"""

import csv
import io
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.artifacts import (
    SPLITS,
    Corpus,
    DraftVocab,
    Split,
    TargetModel,
    file_sha256,
    write_atomically,
)
from eagle3.config import VocabParams, VocabSize, draft_vocab_size
from eagle3.errors import VocabError
from eagle3.maps import MAPS_FILE, VocabMaps, full_vocab, published_maps
from eagle3.store.rows import Rows, load_rows
from eagle3.target import load_tokenizer, special_and_chat_token_ids
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)

COVERAGE_FILE = "coverage.json"

CURVE_POINTS = 64


def count_tokens(rows: Rows, target_vocab: int) -> Tensor:
    """Count each supervised token of a split: int64 [V].

    Raises:
        VocabError: a token is outside the target's vocabulary.
    """
    return _count(rows.tokens_N[rows.loss_mask_N], target_vocab)


def build_draft_vocab(counts_V: Tensor, draft_size: int, keep_ids: Collection[int]) -> VocabMaps:
    """Take the `keep_ids`, then the most frequent tokens, until there are `draft_size`.

    Equal counts go to the lower id, so that the same corpus always gives the same vocabulary, and
    unused ids fill up what counted tokens leave, lowest first.

    Raises:
        VocabError: more places than the target has tokens, or fewer than are to be kept.
    """
    target_vocab, kept = len(counts_V), len(set(keep_ids))
    if not 0 < draft_size <= target_vocab:
        raise VocabError(
            f"vocab.sizes has {draft_size}, but the target has {target_vocab} tokens; "
            f"write full, or a size from 1 to {target_vocab - 1}"
        )
    if draft_size < kept:
        raise VocabError(
            f"vocab.sizes has {draft_size}, but {kept} tokens are always kept (special, chat and "
            f"end tokens, and vocab.keep_tokens); raise the size to {kept} or more, shorten "
            "vocab.keep_tokens, or set vocab.keep_special to false"
        )
    # An index write: looking each token up in a list of ids is slower by a factor that grows with
    # V, 50 at V = 16,384 already (benchmarks/vocab_build.py).
    t2d_V = torch.zeros(target_vocab, dtype=torch.bool)
    t2d_V[_by_rank(counts_V, keep_ids)[:draft_size]] = True
    ids_D = t2d_V.nonzero().flatten()
    return VocabMaps(ids_D - torch.arange(draft_size), t2d_V)


def coverage(counts_V: Tensor, maps: VocabMaps) -> float:
    """Share of the counted tokens that have a draft id; 1.0 if nothing was counted."""
    total = int(counts_V.sum())
    return int(counts_V[maps.t2d_V].sum()) / total if total else 1.0


def kept_ids(target: TargetModel, params: VocabParams) -> list[int]:
    """Ids that a draft vocabulary has whatever their count, ascending.

    Raises:
        VocabError: `vocab.keep_tokens` spells a token that the target does not have.
    """
    ids = set(special_and_chat_token_ids(target)) if params.keep_special else set()
    known = load_tokenizer(target).get_vocab() if params.keep_tokens else {}
    for token in params.keep_tokens:
        if known.get(token, target.vocab_size) >= target.vocab_size:
            raise VocabError(
                f"vocab.keep_tokens has {token!r}, which the target's tokenizer does not know; "
                "spell it as the `vocab` of tokenizer.json does, or remove it"
            )
        ids.add(known[token])
    return sorted(ids)


def adopt_vocab(
    folder: Path, size: VocabSize, target_vocab: int, keep_ids: Collection[int]
) -> VocabMaps:
    """Take the draft vocabulary of the drafter that training starts from, which cannot be another.

    Raises:
        VocabError: it is of another size or target, or lacks a token of `keep_ids`.
    """
    maps = published_maps(folder)
    its_draft, its_target = len(maps.d2t_D), len(maps.t2d_V)
    if its_target != target_vocab:
        raise VocabError(
            f"{folder} (train.init_from) drafts for a target of {its_target} tokens, but the "
            f"target has {target_vocab}; start from a drafter of this target, or from none (null)"
        )
    if its_draft != draft_vocab_size(size, target_vocab):
        its_size = "full" if its_draft == its_target else its_draft
        raise VocabError(
            f"vocab.sizes has {size}, but {folder} (train.init_from) drafts {its_draft} of "
            f"{its_target} tokens, and its vocabulary is kept; set vocab.sizes to [{its_size}], or "
            "train.init_from to null"
        )
    if absent := [token for token in keep_ids if not maps.t2d_V[token]]:
        raise VocabError(
            f"{folder} (train.init_from) cannot draft {len(absent)} of the tokens to keep (first: "
            f"id {absent[0]}), and its vocabulary is kept; set vocab.keep_special to false and "
            "vocab.keep_tokens to [] to take it as it is"
        )
    return maps


def select_vocab(
    target: TargetModel,
    corpus: Corpus,
    params: VocabParams,
    size: VocabSize,
    init_from: str | None,
    out: Path,
) -> DraftVocab:
    """Choose the draft vocabulary of one size by the training split, and measure what it covers.

    With `init_from`, the folder of a published drafter, it is that drafter's.

    Raises:
        VocabError: the size fits neither target nor tokens to keep; a token to keep is unknown;
            `init_from` has another vocabulary.
        ArtifactError: the corpus is damaged or of another target.
    """
    corpus.require_made_from(target, Corpus.home)
    splits = {split: load_rows(Corpus.home / f"{split}.zarr") for split in SPLITS}
    counts = {split: count_tokens(rows, target.vocab_size) for split, rows in splits.items()}
    keep = kept_ids(target, params)
    draft_size = draft_vocab_size(size, target.vocab_size)
    if init_from is not None:
        maps = adopt_vocab(Path(init_from), size, target.vocab_size, keep)
    elif size == "full":
        maps = full_vocab(draft_size)
    else:
        maps = build_draft_vocab(counts["train"], draft_size, keep)
    figures = _coverages(splits, counts, maps)
    made_from = {target.stage: target.fingerprint, corpus.stage: corpus.fingerprint}

    def record(maps_sha256: str) -> DraftVocab:
        return DraftVocab(
            made_from=made_from,
            size=size,
            draft_vocab=draft_size,
            target_vocab=target.vocab_size,
            always_kept=len(keep),
            sha256=maps_sha256,
            coverage=figures,
        )

    chosen = {
        "keep_special": params.keep_special,
        "keep_tokens": list(params.keep_tokens),
        "init_from": init_from,
    }
    work = workspace(f"vocab@{size}", {**made_from, "params": chosen})
    vocab = _write(maps, record, work, out)
    curve = coverage_curve(counts["train"], counts["eval"], keep, draft_size)
    write_atomically(DraftVocab.curve_home(size), curve)
    log.info(
        "draft vocabulary %s: %d of %d tokens, %.2f%% of train and %.2f%% of eval answers",
        *(size, draft_size, target.vocab_size),
        *(100 * figures["coverage_train"], 100 * figures["coverage_eval"]),
    )
    return vocab


def _write(
    maps: VocabMaps, record: Callable[[str], DraftVocab], work: Path, out: Path
) -> DraftVocab:
    """Write maps, coverage and record in `work`, then put them in the place of `out`."""
    result = work / "result"
    with room_for("the draft vocabulary", work):
        shutil.rmtree(result, ignore_errors=True)
        result.mkdir()
        save_file({"d2t": maps.d2t_D, "t2d": maps.t2d_V}, result / MAPS_FILE)
        vocab = record(file_sha256(result / MAPS_FILE))
        write_atomically(result / COVERAGE_FILE, json.dumps(vocab.coverage, indent=2) + "\n")
        vocab.save(result)
        publish(result, out)
    shutil.rmtree(work)
    return vocab


def coverage_curve(
    train_V: Tensor, eval_V: Tensor, keep_ids: Collection[int], draft_size: int
) -> str:
    """Coverage by size as CSV (size, coverage_train, coverage_eval): `draft_size` among others."""
    order_V = _by_rank(train_V, keep_ids)
    smallest = max(1, len(set(keep_ids)))
    spread = np.geomspace(smallest, len(train_V), CURVE_POINTS).round().astype(int).tolist()
    sizes = sorted({*spread, draft_size})
    columns = [
        counts_V[order_V].cumsum(0)[torch.tensor(sizes) - 1].double() / max(1, int(counts_V.sum()))
        for counts_V in (train_V, eval_V)
    ]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["size", "coverage_train", "coverage_eval"])
    rows.writerows(zip(sizes, *(column.tolist() for column in columns), strict=True))
    return text.getvalue()


def _by_rank(counts_V: Tensor, keep_ids: Collection[int]) -> Tensor:
    """All target ids: the kept ones, then by falling count, equal ones by rising id."""
    rank_V = counts_V.clone()
    rank_V[torch.tensor(sorted(set(keep_ids)), dtype=torch.int64)] = counts_V.max() + 1
    return torch.sort(rank_V, descending=True, stable=True).indices


def _count(tokens: np.ndarray, target_vocab: int) -> Tensor:
    counts = np.bincount(tokens, minlength=target_vocab)
    if len(counts) > target_vocab:
        raise VocabError(
            f"the corpus has token {len(counts) - 1}, but the target's vocabulary ends at "
            f"{target_vocab - 1}; run `dvc repro corpus`"
        )
    return torch.from_numpy(counts.astype(np.int64))


def _coverages(
    splits: Mapping[Split, Rows], counts: Mapping[Split, Tensor], maps: VocabMaps
) -> dict[str, float]:
    """`coverage` of all splits together, then by split, then by split and domain."""
    figures = {"coverage": coverage(torch.stack(list(counts.values())).sum(dim=0), maps)}
    for split in SPLITS:
        figures[f"coverage_{split}"] = coverage(counts[split], maps)
    for split, rows in splits.items():
        domains, code_R = np.unique(rows.domains, return_inverse=True)
        code_N = np.repeat(code_R, np.diff(rows.offsets_R1))
        for code, domain in enumerate(domains):
            said = rows.tokens_N[rows.loss_mask_N & (code_N == code)]
            counts_V = _count(said, len(maps.t2d_V))
            figures[f"coverage_{split}_{domain}"] = coverage(counts_V, maps)
    return figures
