"""FSDP2: a drafter in parts, one in each process of a team: float32 weights, gradients, moments.

Parameters are DTensors, cut along their rows by torch's fully_shard. The plain path computes inside
its hooks, which gather the weights before and reduce the gradients after. The hot path adds
gradients past autograd, so it computes on stand-ins: it has its own bfloat16 copies of the
matrices, filled one gathered parameter at a time, and each summed gradient is scattered into the
parameter's part (docs/decisions/0017-sharded-drafters.md).

Shapes: vectors [H] and matrices [O, I] of the network.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from eagle3.drafter import DrafterNet
from eagle3.hot.step import HotPath
from eagle3.stopping import HeldSignals
from eagle3.team import Team

T = TypeVar("T")


class Sharded:
    """Each process holds a part of every parameter, of its gradient and of its moments."""

    stops_alone = False

    def __init__(self, net: DrafterNet, team: Team, device: torch.device) -> None:
        self.net, self.team = net, team
        self.mesh = init_device_mesh(device.type, (team.size,))
        unit = fully_shard(_Whole(net), mesh=self.mesh)
        # Gradients are summed, not averaged (docs/decisions/0012-gradients-are-summed.md).
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._unit: Any = unit
        self._stand_ins: DrafterNet | None = None
        self._filled = False
        self._signals = HeldSignals(team)

    def net_of_hot_path(self) -> DrafterNet:
        """Stand-ins: vectors are whole; a matrix has a shape and no values, and takes gradients."""
        with torch.device("meta"):
            net = DrafterNet(self.net.shape)
        trained = {name: p.requires_grad for name, p in self.net.named_parameters()}
        like = {name: _stand_in(parameter) for name, parameter in self.net.named_parameters()}
        net.load_state_dict(like, assign=True)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(trained[name])
        self._stand_ins, self._filled = net, False
        return net

    @torch.no_grad()
    def refresh(self, hot: HotPath) -> None:
        """One parameter after the other, so that one at a time is there twice."""
        for master, stand_in in self._pairs():
            if stand_in.dim() == 1:
                stand_in.copy_(_gathered(master))
            elif master.requires_grad or not self._filled:
                hot.take_over(stand_in, _gathered(master.to(hot.dtype)))
        self._filled = True

    def run(self, compute: Callable[[], T]) -> T:
        """As `sharding.Placement`; gradients are reduced when the loss goes backward."""
        result: T = self._unit(compute)
        return result

    def sum_gradients(self) -> None:
        """Scatter what the hot path has summed; of the plain path fully_shard has done it."""
        if self._stand_ins is None:
            return
        for master, stand_in in self._pairs():
            if not master.requires_grad:
                continue
            grad = stand_in.grad
            if grad is None:
                # A share without a supervised prediction. The others wait for its zeros.
                grad = stand_in.new_zeros(stand_in.shape)
            stand_in.grad = None
            summed = DTensor.from_local(grad, self.mesh, [Partial()], run_check=False)
            master.grad = summed.redistribute(placements=[Shard(0)])
            del grad, summed

    @contextmanager
    def whole(self) -> Iterator[None]:
        """As `sharding.Placement`: in float32, for as long as the block."""
        self._unit.unshard()
        try:
            yield
        finally:
            self._unit.reshard()

    def to_leader(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One tensor after the other, each to the CPU before the next is gathered."""
        found = {}
        for name, tensor in tensors.items():
            whole = _gathered(tensor.detach())
            if self.team.leads:
                found[name] = whole.cpu()
        return found

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Its rows of it, as a DTensor."""
        whole = whole.to(parameter.device)
        if not whole.dim():
            return whole
        # All have read the same file: nothing is sent. A clone, so that the rest is not held.
        return distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=None).clone()

    def holding_signals(self) -> AbstractContextManager[None]:
        """As `sharding.Placement`."""
        return self._signals.held()

    def stop_if_told(self, save: Callable[[], None]) -> None:
        """As `sharding.Placement`."""
        if self._signals.any_came():
            save()
            self._signals.deliver()

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter with its stand-in."""
        assert self._stand_ins is not None
        pairs = zip(self.net.parameters(), self._stand_ins.parameters(), strict=True)
        return list(pairs)


class _Whole(nn.Module):
    """What fully_shard's hooks surround: any computation with the network."""

    def __init__(self, net: DrafterNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def _stand_in(parameter: nn.Parameter) -> Tensor:
    size = parameter.shape if parameter.dim() == 1 else (1, 1)
    return torch.zeros(size, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
