"""Drafter and target side by side on one device, checked to belong together.

Shapes: H target width, V target vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.artifacts import Drafter, TargetModel, file_sha256
from eagle3.checkpoint import load_drafter
from eagle3.config import EvaluateParams, TargetParams, draft_vocab_size
from eagle3.contract import WEIGHTS_FILE
from eagle3.device import TORCH_DTYPES, pick_device
from eagle3.drafter import DrafterNet
from eagle3.errors import CheckpointError
from eagle3.generate import DraftDecoder, TargetDecoder
from eagle3.maps import VocabMaps
from eagle3.target import (
    end_token_ids,
    load_model,
    read_embedding,
    read_final_norm,
    read_head,
    target_logits,
)


@dataclass(frozen=True)
class Pair:
    """A drafter and its target; the drafter and the embedding it reads are float32."""

    model: Any
    aux_layers: tuple[int, int, int]
    end_tokens: frozenset[int]
    norm_H: Tensor
    eps: float
    head_VH: Tensor
    net: DrafterNet
    maps: VocabMaps
    embedding_VH: Tensor

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return self.embedding_VH.device

    def target_decoder(self) -> TargetDecoder:
        """The target with an empty cache."""
        return TargetDecoder(self.model, self.aux_layers)

    def draft_decoder(self) -> DraftDecoder:
        """The drafter with an empty cache."""
        return DraftDecoder(self.net, self.embedding_VH, self.maps)

    def target_logits(self, last_NH: Tensor) -> Tensor:
        """The target's logits of states before the final norm: [N, V]."""
        return target_logits(last_NH.to(self.device), self.norm_H, self.eps, self.head_VH)


def load_pair(
    target: TargetModel, drafter: Drafter, params: EvaluateParams, target_params: TargetParams
) -> Pair:
    """Read both from their homes onto `evaluate.device`.

    Raises:
        CheckpointError: as `load_checked_drafter`.
        TargetError: the target cannot be loaded.
    """
    device = pick_device(params.device, "evaluate.device")
    dtype = TORCH_DTYPES[target_params.dtype]
    net, maps = load_checked_drafter(drafter, target)
    norm_H, eps = read_final_norm(target)
    return Pair(
        model=load_model(target, target_params.model_copy(update={"device": device.type})),
        aux_layers=target.aux_layers,
        end_tokens=end_token_ids(target),
        norm_H=norm_H.to(device, dtype),
        eps=eps,
        head_VH=read_head(target).to(device, dtype),
        net=net.to(device).eval(),
        maps=maps,
        embedding_VH=read_embedding(target).to(device, torch.float32),
    )


def load_checked_drafter(drafter: Drafter, target: TargetModel) -> tuple[DrafterNet, VocabMaps]:
    """Read a drafter, in float32 on the CPU, and hold it against its record and its target.

    Raises:
        CheckpointError: other weights, or another draft or target vocabulary, than recorded.
    """
    home = Drafter.home(drafter.size)
    again = f"run `dvc repro --force train@{drafter.size}`"
    expected = draft_vocab_size(drafter.size, target.vocab_size)
    if drafter.draft_vocab != expected:
        raise CheckpointError(
            f"{home / Drafter.manifest} has draft_vocab {drafter.draft_vocab}, but size "
            f"{drafter.size} is {expected} of the target's {target.vocab_size} tokens; {again}"
        )
    found = file_sha256(home / WEIGHTS_FILE)
    if found != drafter.sha256:
        raise CheckpointError(
            f"{home / WEIGHTS_FILE} has sha256 {found[:12]}, but {Drafter.manifest} beside it was "
            f"written for {drafter.sha256[:12]}; {again}"
        )
    net, maps = load_drafter(home)
    shape = (net.shape.draft_vocab, net.shape.vocab_size)
    if shape != (expected, target.vocab_size):
        raise CheckpointError(
            f"{home} drafts {shape[0]} of {shape[1]} tokens, but its record and the target have "
            f"{expected} of {target.vocab_size}; {again}"
        )
    return net, maps
