"""What the pipeline asks of whoever runs the target model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the target answers. Temperature 0 is greedy, and then seed and top_p do nothing."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class RowStates:
    """Hidden states of one row: T tokens, H target width, in the dtype the target ran in."""

    aux_T3H: Tensor
    """The residual stream after each of the three aux layers."""
    last_TH: Tensor
    """The residual stream after the last layer, before the final norm."""


class TargetEngine(Protocol):
    """Runs the target. The same call on the same machine gives the same tokens, bit for bit."""

    @property
    def name(self) -> str:
        """Engine and version, such as `transformers 5.24.0`; kept in the store's attributes."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each prompt; the end-of-turn token is included where the target wrote one."""

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Hidden states of each row, one forward pass, on the CPU."""
