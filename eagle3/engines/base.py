"""What the pipeline asks of whoever runs the target model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

LAST = "before final norm"
"""Which last state an engine gives, as the stores say it."""


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


class TextEngine(Protocol):
    """Writes as the target does. The same call on the same machine gives the same tokens."""

    @property
    def name(self) -> str:
        """Engine and version, such as `transformers 5.24.0`; kept in the store's attributes."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue each prompt; the end-of-turn token is included where the target wrote one."""


class StatesEngine(Protocol):
    """Gives the target's hidden states, bit for bit the same on the same machine."""

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Hidden states of each row, one forward pass, on the CPU."""


class TargetEngine(TextEngine, StatesEngine, Protocol):
    """Runs the target: its text and its states."""


@runtime_checkable
class CapturingEngine(TargetEngine, Protocol):
    """An engine that can keep the states of a text while it writes it."""

    def generate_with_states(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[list[list[int]], list[RowStates | None]]:
        """The answers of `generate`, token for token, and the states of each prompt and answer.

        They equal those of `states` within the rounding of the dtype that the target runs in. None
        for a row whose states cannot be had this way.
        """
