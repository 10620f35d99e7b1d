"""What serving found, as figures: one number per question, and every run for who asks further."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.acceptance import Tally
from eagle3.engines.counters import total
from eagle3.engines.served import Served

PLAIN = 0
"""The k of a server without drafter."""


@dataclass(frozen=True)
class Turn:
    """One answer of an eval row, and the tokens before it."""

    row: int
    domain: str
    prompt: list[int]
    stored: list[int]

    @property
    def limit(self) -> int:
        """Longest answer to ask for: a stored answer without an end token was cut there."""
        return len(self.stored)


@dataclass(frozen=True)
class ServedRun:
    """All turns of one domain, answered in one way."""

    k: int
    temperature: float
    batch: int
    domain: str
    turns: list[Turn]
    served: Served

    @property
    def greedy(self) -> bool:
        """Whether the answers are the target's likeliest tokens."""
        return self.temperature == 0


@dataclass(frozen=True)
class Difference:
    """A greedy answer that is another with the drafter than without."""

    k: int
    batch: int
    domain: str
    row: int
    at: int
    """Tokens of the answer that are still equal."""
    top_two_gap: float | None
    """Between the target's two likeliest tokens there, in nats; None if nobody asked."""


def metrics(
    runs: Sequence[ServedRun],
    differences: Sequence[Difference],
    replayed: Mapping[int, Tally],
) -> dict[str, float]:
    """The figures of all domains together, by the names they have everywhere.

    Nothing before the k is the greedy single stream; `sampled` and `batch` say what else is meant.
    What needs the target alone, or replay, is there if those are.
    """
    figures: dict[str, float] = {}
    ks = sorted({run.k for run in runs} - {PLAIN})
    with_plain = any(run.k == PLAIN for run in runs)
    for temperature, batch in sorted({(run.temperature, run.batch) for run in runs}):
        mine = [run for run in runs if (run.temperature, run.batch) == (temperature, batch)]
        label = _label(temperature, batch)
        if with_plain:
            figures[f"tokens_per_second_plain{label}"] = _speed(mine, PLAIN)
        for k in ks:
            figures.update(_of_one_way(mine, label, k))
            if with_plain:
                figures[f"speedup_served{label}_k{k}"] = _speed(mine, k) / _speed(mine, PLAIN)
    for k, tally in replayed.items():
        served = figures[f"acceptance_length_served_k{k}"]
        figures[f"acceptance_length_same_prompts_k{k}"] = tally.acceptance_length
        figures[f"served_minus_replay_k{k}"] = served - tally.acceptance_length
    if with_plain:
        figures.update(_losslessness(runs, differences, ks))
        figures["answers_as_stored"] = _share_as_stored(runs)
    return figures


def _of_one_way(runs: Sequence[ServedRun], label: str, k: int) -> dict[str, float]:
    counters = total(run.served.counters for run in runs if run.k == k)
    return {
        f"acceptance_length_served{label}_k{k}": counters.acceptance_length,
        f"tokens_per_second_served{label}_k{k}": _speed(runs, k),
        **{
            f"acceptance_rate_served{label}_k{k}_pos{position}": rate
            for position, rate in enumerate(counters.rates)
        },
    }


def _losslessness(
    runs: Sequence[ServedRun], differences: Sequence[Difference], ks: Sequence[int]
) -> dict[str, float]:
    shares = {}
    for k in ks:
        greedy = sum(len(run.turns) for run in runs if run.k == k and run.greedy)
        changed = sum(difference.k == k for difference in differences)
        shares[f"lossless_served_k{k}"] = 1 - changed / greedy
    return shares


def details(
    runs: Sequence[ServedRun],
    differences: Sequence[Difference],
    replayed: Mapping[int, Tally],
) -> dict[str, Any]:
    """Every run, every changed answer, and replay's counts of the same turns."""
    return {
        "runs": [_run_details(run) for run in runs],
        "differences": [asdict(difference) for difference in differences],
        "replay_same_prompts": {str(k): asdict(tally) for k, tally in replayed.items()},
    }


def _run_details(run: ServedRun) -> dict[str, Any]:
    counters = run.served.counters
    return {
        "k": run.k,
        "temperature": run.temperature,
        "batch": run.batch,
        "domain": run.domain,
        "answers": len(run.turns),
        "tokens": run.served.tokens,
        "seconds": run.served.seconds,
        **asdict(counters),
        "acceptance_length": counters.acceptance_length,
        "acceptance_rates": counters.rates,
    }


def _label(temperature: float, batch: int) -> str:
    sampled = "" if temperature == 0 else f"_sampled{temperature:g}"
    return sampled + ("" if batch == 1 else f"_batch{batch}")


def _speed(runs: Sequence[ServedRun], k: int) -> float:
    """Tokens of answers per second, from the first request to the last answer, prefill included."""
    mine = [run.served for run in runs if run.k == k]
    return sum(served.tokens for served in mine) / sum(served.seconds for served in mine)


def _share_as_stored(runs: Sequence[ServedRun]) -> float:
    """Of the target's own greedy single-stream answers: those that are the corpus's."""
    equal = [
        answer == turn.stored
        for run in runs
        if run.k == PLAIN and run.greedy and run.batch == 1
        for turn, answer in zip(run.turns, run.served.answers, strict=True)
    ]
    return sum(equal) / len(equal)
