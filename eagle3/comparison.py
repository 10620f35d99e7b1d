"""What a comparison of draft vocabularies holds, as types: `eagle3.decision` fills them in."""

from pydantic import BaseModel, ConfigDict

from eagle3.config import VocabSize


class SharedCosts(BaseModel):
    """What is the same work for every draft vocabulary: means over the sizes' measurements.

    Costs are in plain target steps timed in the same run, which cancels much of the machine's load.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_step_us: float
    layer: float
    """The drafter's layer, one draft step."""
    verify: dict[int, float]
    """By k: the target's check of k + 1 tokens."""
    spread: float
    """Largest relative distance between two sizes' measurements of one of these costs."""


class ServedFigures(BaseModel):
    """One drafter inside a serving engine, greedy, a single stream. Dictionaries are by k."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    dtype: str
    acceptance_length: dict[int, float]
    """By the engine's own counters."""
    minus_replay: dict[int, float]
    """The same less replay's of the same answers."""
    speedup: dict[int, float]
    """Tokens per second with over without the drafter, in the engine."""
    lossless: dict[int, float]
    """Share of greedy answers that are the same with and without the drafter."""


class SizeFigures(BaseModel):
    """One draft vocabulary in the comparison. Dictionaries by k have the drafted tokens as keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: VocabSize
    draft_vocab: int
    coverage_train: float
    coverage_eval: float
    acceptance_length: dict[int, float]
    """By k, over all eval rows."""
    sampling_error: dict[int, float]
    """By k: one standard error of the acceptance length."""
    acceptance_length_by_domain: dict[str, dict[int, float]]
    """By domain, then by k."""
    oov_miss_rate: dict[int, float]
    """By k: drafts that ended at a token outside the draft vocabulary."""
    draft_layer_us: float
    draft_head_us: float
    target_step_us: float
    head: float
    """The draft head, in plain target steps of the same run."""
    speedup_projected: dict[int, float]
    """By k, with the shared costs, so that only acceptance and head differ between sizes."""
    served: ServedFigures | None
    """None: not served."""


class Verdict(BaseModel):
    """Which of two draft vocabularies is faster at one k, and what would turn that round.

    Each of the last four fields is a change made alone; None where no value of it would do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: int
    winner: VocabSize
    other: VocabSize
    advantage: float
    """Speed of the winner relative to the other, less 1."""
    noise: float
    """What measurement error alone can make of the advantage, about two standard errors."""
    acceptance_ratio: float
    """Measured acceptance length, winner's over other's."""
    break_even_ratio: float
    """The ratio below which the other wins, at the measured costs."""
    other_needs_acceptance: float | None
    """Acceptance length above which the other wins; None: more than k + 1."""
    other_needs_head_us: float | None
    """Head cost of the other below which it wins; None: it loses with a free head, too."""
    target_step_boundary_us: float | None
    """Target step (verifying scaled with it) on whose far side the other wins."""
    head_scale_boundary: float | None
    """Factor on both heads' cost (0.125: split over 8 devices) on whose far side the other wins."""

    @property
    def within_noise(self) -> bool:
        """Whether these measurements cannot tell the two apart."""
        return self.advantage <= self.noise
