"""Which draft vocabulary is faster, and what would have to change for the other to win.

One verify cycle drafts k tokens and checks them: v + k (layer + head), in plain target steps, for
tau tokens; that is the speed model tau / (v + k c) of acceptance.py. Between two sizes only tau and
the head differ; every boundary below is that model solved for one term.
"""

import math
from collections.abc import Sequence

from eagle3.comparison import SharedCosts, SizeFigures, Verdict


def acceptance_error(rates: Sequence[float], drafts: int) -> float:
    """Standard error of an acceptance length measured over a number of drafts.

    `rates[i]` is the share of drafts with more than i tokens accepted, which is the whole
    distribution: the sum of (2i + 1) rates[i] is the mean square of the accepted count. Drafts are
    taken as independent; those of one answer are not quite, so the true error is somewhat larger.
    """
    mean = sum(rates)
    mean_square = sum((2 * position + 1) * rate for position, rate in enumerate(rates))
    # Rounding can bring a spread of nothing below zero.
    return math.sqrt(max(mean_square - mean**2, 0.0) / max(drafts, 1))


def relative_spread(values: Sequence[float]) -> float:
    """How far apart several measurements of one cost lie, relative to their mean; 0 for one."""
    return (max(values) - min(values)) / (sum(values) / len(values))


def verdicts_at(k: int, sizes: Sequence[SizeFigures], shared: SharedCosts) -> list[Verdict]:
    """The fastest size at k against each of the others, in their order; none for a single size.

    Of two equally fast sizes the smaller draft vocabulary wins, since it takes less memory, too.
    """
    winner = min(sizes, key=lambda size: (-size.speedup_projected[k], size.draft_vocab))
    return [_verdict(k, winner, other, shared) for other in sizes if other is not winner]


def _verdict(k: int, winner: SizeFigures, other: SizeFigures, shared: SharedCosts) -> Verdict:
    tau, other_tau = winner.acceptance_length[k], other.acceptance_length[k]
    cycle, other_cycle = (_cycle(k, size, shared) for size in (winner, other))
    needed_tau = tau * other_cycle / cycle
    needed_head = (other_tau * cycle / tau - shared.verify[k]) / k - shared.layer
    target_scale = _target_scale_boundary(k, winner, other, shared)
    step_us = shared.target_step_us
    return Verdict(
        k=k,
        winner=winner.size,
        other=other.size,
        advantage=winner.speedup_projected[k] / other.speedup_projected[k] - 1,
        noise=_noise(k, (winner, other), shared),
        acceptance_ratio=tau / other_tau,
        break_even_ratio=cycle / other_cycle,
        other_needs_acceptance=needed_tau if needed_tau <= k + 1 else None,
        other_needs_head_us=needed_head * step_us if needed_head > 0 else None,
        target_step_boundary_us=None if target_scale is None else target_scale * step_us,
        head_scale_boundary=_head_scale_boundary(k, winner, other, shared),
    )


def _cycle(k: int, size: SizeFigures, shared: SharedCosts) -> float:
    return shared.verify[k] + k * (shared.layer + size.head)


def _target_scale_boundary(
    k: int, winner: SizeFigures, other: SizeFigures, shared: SharedCosts
) -> float | None:
    """Factor on the target's own times, drafting unchanged, at which both are equally fast."""
    tau, other_tau = winner.acceptance_length[k], other.acceptance_length[k]
    step, other_step = shared.layer + winner.head, shared.layer + other.head
    return _positive_ratio(
        k * (other_tau * step - tau * other_step), shared.verify[k] * (tau - other_tau)
    )


def _head_scale_boundary(
    k: int, winner: SizeFigures, other: SizeFigures, shared: SharedCosts
) -> float | None:
    """Factor on the cost of both heads at which both are equally fast."""
    tau, other_tau = winner.acceptance_length[k], other.acceptance_length[k]
    return _positive_ratio(
        (other_tau - tau) * (shared.verify[k] + k * shared.layer),
        k * (tau * other.head - other_tau * winner.head),
    )


def _positive_ratio(numerator: float, denominator: float) -> float | None:
    if denominator == 0 or numerator / denominator <= 0:
        return None
    return numerator / denominator


def _noise(k: int, pair: tuple[SizeFigures, SizeFigures], shared: SharedCosts) -> float:
    # Acceptance: two standard errors of the ratio. Time: the heads are the only costs that differ,
    # each as uncertain as the costs that were measured more than once turned out to be.
    acceptance = 2 * math.hypot(*(s.sampling_error[k] / s.acceptance_length[k] for s in pair))
    heads = (k * size.head * shared.spread / _cycle(k, size, shared) for size in pair)
    return math.hypot(acceptance, *heads)
