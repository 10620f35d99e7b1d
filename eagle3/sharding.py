"""Where a drafter's float32 weights, gradients and moments are: all in every process of a team, or
a part in each (sharded.py), and what that asks of a training step.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from eagle3.config import Sharding
from eagle3.drafter import DrafterNet
from eagle3.hot.step import HotPath
from eagle3.team import Team

T = TypeVar("T")


class Placement(Protocol):
    """Where the network's parameters are, and what that asks of a training step.

    Every process of a team must make the same calls, but for `net_of_hot_path`.
    """

    @property
    def stops_alone(self) -> bool:
        """Whether one process can write the training state without the others."""
        ...

    def net_of_hot_path(self) -> DrafterNet:
        """The network that the hot path reads, and adds gradients to."""
        ...

    def refresh(self, hot: HotPath) -> None:
        """Have the hot path take over the weights: at first, and after every update."""
        ...

    def run(self, compute: Callable[[], T]) -> T:
        """Compute a loss of the network; its weights are whole meanwhile."""
        ...

    def sum_gradients(self) -> None:
        """Give every parameter its gradient, summed over the team: after all micro-batches."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Have the network whole in every process, to read it outside of a step."""
        ...

    def to_leader(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters and moments, whole, in the process that leads; nothing in the others."""
        ...

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """What this process holds of a tensor that is cut like a parameter (a number is not)."""
        ...

    def holding_signals(self) -> AbstractContextManager[None]:
        """Let no signal end this process between two calls that all must make."""
        ...

    def stop_if_told(self, save: Callable[[], None]) -> None:
        """Between two steps: if a signal came to any process, save in all and deliver it."""
        ...


class Replicated:
    """Every process holds all; gradients are summed once a step (team.py)."""

    stops_alone = True

    def __init__(self, net: DrafterNet, team: Team) -> None:
        self.net, self.team = net, team

    def net_of_hot_path(self) -> DrafterNet:
        """The network itself."""
        return self.net

    def refresh(self, hot: HotPath) -> None:
        """As `Placement`."""
        hot.refresh()

    def run(self, compute: Callable[[], T]) -> T:
        """As `Placement`."""
        return compute()

    def sum_gradients(self) -> None:
        """As `Placement`."""
        self.team.sum_gradients(self.net.parameters())

    def whole(self) -> AbstractContextManager[None]:
        """It always is."""
        return nullcontext()

    def to_leader(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `Placement`."""
        return dict(tensors) if self.team.leads else {}

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """All of it, on the parameter's device."""
        return whole.to(parameter.device)

    def holding_signals(self) -> AbstractContextManager[None]:
        """A signal may end this process: it can write the state alone."""
        return nullcontext()

    def stop_if_told(self, save: Callable[[], None]) -> None:
        """Nothing is held back."""


def place(net: DrafterNet, sharding: Sharding, team: Team, device: torch.device) -> Placement:
    """Place the parameters of a network, which are whole and equal in all processes."""
    if sharding == "none":
        return Replicated(net, team)
    # Here, since torch's part of it takes a second to import.
    from eagle3.sharded import Sharded

    return Sharded(net, team, device)
