"""The optimizer's part of a step: its rate, and clip and update without a pass over the gradients.

The fused AdamW divides gradients by `grad_scale` as it reads them, for loss scaling
(torch.amp.GradScaler sets it). Clipping is a division too.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eagle3.config import TrainParams


def adamw(
    parameters: Sequence[nn.Parameter], rate: float, betas: tuple[float, float], decay: float
) -> torch.optim.AdamW:
    """AdamW with float32 moments, in one kernel for many parameters."""
    return torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=decay, fused=True)


def clip_and_update(optimizer: torch.optim.AdamW, max_norm: float) -> Tensor:
    """Scale gradients down to `max_norm` if they are above, update, and drop them.

    Returns the norm before. The host does not wait for the device.
    """
    grads = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    norm = nn.utils.get_total_norm(grads, foreach=True)
    if hasattr(norm, "full_tensor"):
        # A DTensor, of gradients that lie in parts in several processes.
        norm = norm.full_tensor()
    # The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def learning_rate(params: TrainParams, step: int) -> float:
    """Linear warm-up, then a cosine down to `min_learning_rate_ratio` of the peak."""
    if step < params.warmup_steps:
        return params.learning_rate * (step + 1) / params.warmup_steps
    done = (step - params.warmup_steps) / (params.total_steps - params.warmup_steps)
    floor = params.min_learning_rate_ratio
    return params.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
