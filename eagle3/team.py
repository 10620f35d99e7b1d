"""Processes that train one drafter together: each holds all of it and takes a share of every step.

What they find is summed, never averaged: the loss is divided by the predictions of the whole step
before its gradient is taken (docs/decisions/0012-gradients-are-summed.md). A sum is the same number
in every process, so their weights stay equal bit by bit, and one of them can write for all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from eagle3.errors import ParamsError, TrainingError

T = TypeVar("T")

MEETING_PLACE = "EAGLE3_MEETING_PLACE"
"""Environment variable: torch's `init_method`, where it is not the one of torchrun (env://)."""

LONGEST_WAIT = timedelta(hours=2)
"""For a process that writes a checkpoint to a slow disk. One that died is noticed without it."""


@dataclass(frozen=True)
class Team:
    """This process among those that train together. Every one must make the same calls."""

    rank: int
    size: int
    place: int
    """Among the processes of its machine: the number of its GPU."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of what the team has to do; the parts together are all of it."""
        return items[self.rank :: self.size]

    def device(self, device: torch.device) -> torch.device:
        """This process's own device of that type."""
        # With its number: a thread that reads ahead would otherwise take the first GPU.
        alone = self.size == 1 or device.type != "cuda"
        return device if alone else torch.device("cuda", self.place)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over the team, in float64: whole numbers exactly."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def count(self, number: int) -> int:
        """A whole number summed over the team."""
        return int(self.sums([number])[0])

    def largest(self, number: int) -> int:
        """The largest of the team's whole numbers, none of which is negative."""
        mine = [0] * self.size
        mine[self.rank] = number
        return int(max(self.sums(mine)))

    def meet(self) -> None:
        """Wait until all have come here."""
        self.sums([0.0])

    def require_same_step(self, step: int) -> None:
        """Make sure that all go on from the same training state.

        Raises:
            TrainingError: they found different ones.
        """
        mine = [0] * self.size
        mine[self.rank] = step
        found = [int(step) for step in self.sums(mine)]
        if len(set(found)) > 1:
            raise TrainingError(
                f"the processes would go on from different steps ({found} by rank); "
                "run them in one project folder, which all machines share"
            )

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every parameter's gradient by its sum over the team."""
        if self.size == 1:
            return
        waiting = []
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                # A share without a supervised prediction. The others wait for its zeros.
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
        for reduction in waiting:
            reduction.wait()


ALONE = Team(rank=0, size=1, place=0)


@contextmanager
def joined(device: torch.device, environ: Mapping[str, str]) -> Iterator[Team]:
    """Join the team that `environ` speaks of, in the variables that torchrun sets.

    Gradients go by NCCL on a GPU and by gloo on a CPU, single numbers always by gloo.

    Raises:
        ParamsError: the machine has too few GPUs.
    """
    rank, size, place = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    backend = "gloo"
    if device.type == "cuda":
        needed, there = int(environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
        if needed > there:
            raise ParamsError(
                f"{needed} processes train on this machine, a GPU each, but it has {there}; lower "
                f"train.processes ({size}), or set train.device to cpu"
            )
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in environ:
        # Each would take all cores.
        torch.set_num_threads(max(1, threads // size))
    meeting_place = environ.get(MEETING_PLACE, "env://")
    dist.init_process_group(
        backend, init_method=meeting_place, rank=rank, world_size=size, timeout=LONGEST_WAIT
    )
    try:
        yield Team(rank, size, place)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
