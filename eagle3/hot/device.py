"""Copies to the device that the host does not wait for."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device; from pinned memory, since other copies stop for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def bring_all(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Several vectors of one dtype, in one copy."""
    return list(bring(torch.cat(list(tensors)), device).split([len(tensor) for tensor in tensors]))
