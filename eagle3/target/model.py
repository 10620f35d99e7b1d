"""The whole target model, for engines that run it here, and its last step: norm and head.

Shapes: N tokens, H target width, V target vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.device import TORCH_DTYPES, pick_device
from eagle3.errors import TargetError
from eagle3.target.folder import trusted_folder
from eagle3.target.quiet import quiet_transformers


def load_model(target: TargetModel, params: TargetParams, home: Path = TargetModel.home) -> Any:
    """The target on `target.device` in `target.dtype`, ready to be run, not trained.

    Raises:
        TargetError: transformers cannot load it.
        ArtifactError: the folder is gone, or its code changed since it was pinned.
    """
    from transformers import AutoModelForCausalLM

    folder = trusted_folder(target, home)
    device = pick_device(params.device, "target.device")
    with quiet_transformers():
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=TORCH_DTYPES[params.dtype],
                local_files_only=True,
                trust_remote_code=target.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise TargetError(
                f"transformers cannot load {folder} ({error}); run it through another engine, "
                "or set target.source to another model"
            ) from error
    return model.to(device).eval().requires_grad_(False)


def target_logits(last_NH: Tensor, norm_H: Tensor, eps: float, head_VH: Tensor) -> Tensor:
    """The target's logits, [N, V] float32, from its last state before the final norm.

    The norm works in float32 and rounds to the norm's dtype before it scales, as Llama's does, so
    in float32 these are the target's own logits to the last bit or two.
    """
    states_NH = last_NH.float()
    scale_N1 = torch.rsqrt(states_NH.pow(2).mean(dim=-1, keepdim=True) + eps)
    normed_NH = norm_H * (states_NH * scale_N1).to(norm_H.dtype)
    return F.linear(normed_NH.to(head_VH.dtype), head_VH).float()
