"""What a training run goes on from: of everything that trains, weights and moments, each whole.

A state does not say how many processes made it or how they shared the weights: it fits any.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.checkpoint import load_training_state, save_training_state
from eagle3.drafter import DrafterNet
from eagle3.sharding import Placement

STATE = "training"
"""Folder in a run's work folder."""


def save_state(
    work: Path,
    net: DrafterNet,
    optimizer: torch.optim.Optimizer,
    placement: Placement,
    facts: Mapping[str, Any],
    leads: bool,
) -> None:
    """Replace the run's training state; the process that leads writes."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    tensors = {f"net.{name}": parameter for name, parameter in trained.items()}
    for name, parameter in trained.items():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{moment}.{name}"] = value
    whole = placement.to_leader(tensors)
    if leads:
        save_training_state(work / STATE, whole, facts)


def resume_state(
    work: Path, net: DrafterNet, optimizer: torch.optim.Optimizer, placement: Placement
) -> dict[str, Any] | None:
    """Put the state of an earlier run into network and optimizer; its facts, or None without one.

    Raises:
        CheckpointError: the file is damaged.
    """
    found = load_training_state(work / STATE)
    if found is None:
        return None
    tensors, facts = found
    parameters = dict(net.named_parameters())
    for key, tensor in tensors.items():
        if key.startswith("net."):
            parameter = parameters[key.removeprefix("net.")]
            with torch.no_grad():
                parameter.copy_(placement.part(parameter, tensor))
        else:
            _, moment, name = key.split(".", 2)
            # AdamW's fused kernel wants its step counts in float32 on the parameter's device.
            parameter = parameters[name]
            optimizer.state[parameter][moment] = placement.part(parameter, tensor)
    return facts
