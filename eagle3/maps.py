"""The maps between draft ids and target ids: their form, and where they are read.

Shapes: V target vocabulary, D draft vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle3.artifacts import DraftVocab, file_sha256
from eagle3.contract import CONFIG_FILE, WEIGHTS_FILE
from eagle3.errors import VocabError

MAPS_FILE = "vocab.safetensors"


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


def full_vocab(target_vocab: int) -> VocabMaps:
    """The maps of a drafter that can say whatever the target can: identities."""
    return VocabMaps(
        torch.zeros(target_vocab, dtype=torch.int64), torch.ones(target_vocab, dtype=torch.bool)
    )


def require_agreement(maps: VocabMaps, where: str, fix: str) -> None:
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
        raise VocabError(f"the maps in {where} are damaged: {fault}; {fix}")


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
    require_agreement(maps, str(path), "run `dvc repro --force vocab`")
    return maps


def published_maps(folder: Path) -> VocabMaps:
    """Read the maps of a drafter in the plain format; a full vocabulary has none in its file.

    Raises:
        VocabError: no such drafter, or its maps are damaged.
    """
    path = folder / WEIGHTS_FILE
    fix = f"`eagle3 check {folder}` names every fault"
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        vocab_size, draft_vocab = config["vocab_size"], config["draft_vocab_size"]
        if draft_vocab == vocab_size:
            return full_vocab(vocab_size)
        with safe_open(path, framework="pt") as file:
            maps = VocabMaps(file.get_tensor("d2t"), file.get_tensor("t2d"))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise VocabError(
            f"{folder} (train.init_from) is no drafter in the plain format ({error!r}); {fix}, and "
            "`eagle3 import` converts those of other layouts"
        ) from error
    require_agreement(maps, str(path), fix)
    if (len(maps.d2t_D), len(maps.t2d_V)) != (draft_vocab, vocab_size):
        raise VocabError(
            f"{path} maps {len(maps.d2t_D)} of {len(maps.t2d_V)} tokens, but its {CONFIG_FILE} "
            f"says {draft_vocab} of {vocab_size}; {fix}"
        )
    return maps
