"""The draft vocabulary: the most frequent target tokens, and the maps between the two.

Shapes: V target vocabulary, D draft vocabulary, K tokens that are kept whatever their count.
"""

import csv
import io
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
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
from eagle3.store.rows import Rows, load_rows
from eagle3.target import load_tokenizer, special_and_chat_token_ids
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)

MAPS_FILE = "vocab.safetensors"
COVERAGE_FILE = "coverage.json"

CURVE_POINTS = 64


@dataclass(frozen=True, eq=False)
class VocabMaps:
    """Draft ids to target ids and back, in the form that engines load."""

    d2t_D: Tensor
    """int64 offsets: the target id of draft id i is `i + d2t[i]`; ids ascend."""
    t2d_V: Tensor
    """bool: True where the target's token has a draft id."""

    @property
    def ids_D(self) -> Tensor:
        """Target ids of the draft ids, int64, ascending."""
        return torch.arange(len(self.d2t_D), device=self.d2t_D.device) + self.d2t_D

    @property
    def to_draft_V(self) -> Tensor:
        """Draft ids of the target ids, int64; -1 for tokens outside."""
        ids_D = self.ids_D
        draft_V = torch.full(self.t2d_V.shape, -1, dtype=torch.int64, device=ids_D.device)
        draft_V[ids_D] = torch.arange(len(ids_D), device=ids_D.device)
        return draft_V


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


def full_vocab(target_vocab: int) -> VocabMaps:
    """The maps of a drafter that can say whatever the target can: identities."""
    return VocabMaps(
        torch.zeros(target_vocab, dtype=torch.int64), torch.ones(target_vocab, dtype=torch.bool)
    )


def coverage(counts_V: Tensor, maps: VocabMaps) -> float:
    """Share of the counted tokens that have a draft id; 1.0 if nothing was counted."""
    total = int(counts_V.sum())
    return int(counts_V[maps.t2d_V].sum()) / total if total else 1.0


def require_agreement(maps: VocabMaps, where: str) -> None:
    """Refuse maps that are not each other's inverse; `where` names their file.

    Raises:
        VocabError: ids do not rise, lie outside the target's vocabulary, or are not those of t2d.
    """
    ids_D, target_vocab = maps.ids_D, len(maps.t2d_V)
    fault = None
    if maps.d2t_D.dtype != torch.int64 or maps.t2d_V.dtype != torch.bool:
        fault = f"d2t is {maps.d2t_D.dtype} and t2d {maps.t2d_V.dtype}, not int64 and bool"
    elif len(ids_D) == 0 or ids_D[0] < 0 or ids_D[-1] >= target_vocab:
        fault = f"d2t leads outside the target's {target_vocab} tokens"
    elif not bool((ids_D.diff() > 0).all()):
        fault = "the target ids of d2t do not rise"
    elif int(maps.t2d_V.sum()) != len(ids_D) or not bool(maps.t2d_V[ids_D].all()):
        fault = "t2d marks other tokens than d2t names"
    if fault:
        raise VocabError(f"the maps in {where} are damaged: {fault}; run `dvc repro --force vocab`")


def load_maps(vocab: DraftVocab) -> VocabMaps:
    """Read the maps of a draft vocabulary from its home.

    Raises:
        VocabError: missing, unreadable, or not the file that the record describes.
    """
    path = DraftVocab.home(vocab.size) / MAPS_FILE
    if not path.is_file():
        raise VocabError(f"{path} does not exist; run `dvc repro vocab`")
    if file_sha256(path) != vocab.sha256:
        raise VocabError(
            f"{path} is not the file that {vocab.manifest} beside it describes (sha256 "
            f"{vocab.sha256[:12]}); run `dvc repro --force vocab`"
        )
    try:
        tensors = load_file(path)
        maps = VocabMaps(tensors["d2t"], tensors["t2d"])
    except (SafetensorError, KeyError) as error:
        raise VocabError(f"{path} is damaged ({error!r}); run `dvc repro --force vocab`") from error
    require_agreement(maps, str(path))
    return maps


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


def select_vocab(
    target: TargetModel, corpus: Corpus, params: VocabParams, size: VocabSize, out: Path
) -> DraftVocab:
    """Choose the draft vocabulary of one size by the training split, and measure what it covers.

    Raises:
        VocabError: the size fits neither target nor tokens to keep; a token to keep is unknown.
        ArtifactError: the corpus is damaged or of another target.
    """
    corpus.require_made_from(target, Corpus.home)
    splits = {split: load_rows(Corpus.home / f"{split}.zarr") for split in SPLITS}
    counts = {split: count_tokens(rows, target.vocab_size) for split, rows in splits.items()}
    keep = kept_ids(target, params)
    draft_size = draft_vocab_size(size, target.vocab_size)
    maps = (
        full_vocab(draft_size)
        if size == "full"
        else build_draft_vocab(counts["train"], draft_size, keep)
    )
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

    chosen = {"keep_special": params.keep_special, "keep_tokens": list(params.keep_tokens)}
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
