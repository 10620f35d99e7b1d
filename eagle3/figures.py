"""What an evaluation found, as figures: overall metrics, details by domain, a CSV to plot."""

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3.acceptance import Tally, projected_speedup
from eagle3.agreement import CountDifference, TextDifference
from eagle3.artifacts import Evaluation
from eagle3.config import EvaluateParams
from eagle3.cost import StepCosts


@dataclass
class TextChecks:
    """What the stored states say of the stored answers."""

    near_ties: list[dict[str, Any]] = field(default_factory=list)
    not_greedy: list[dict[str, Any]] = field(default_factory=list)
    answers: int = 0
    truncated: int = 0
    """Answers without an end token: cut by corpus.answers.max_new_tokens or corpus.max_length."""
    sampled_sum: float = 0.0
    sampled_count: int = 0

    @property
    def sampled_acceptance(self) -> float:
        """Chance, at temperature 1, that the first drafted token is taken; mean over the tokens."""
        return self.sampled_sum / max(self.sampled_count, 1)


@dataclass
class LoopResult:
    """The real loop's counts, and every difference from replay and from greedy text."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """By number of the row."""
    text_differences: list[TextDifference] = field(default_factory=list)
    count_differences: list[CountDifference] = field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """All that was measured of one drafter."""

    params: EvaluateParams
    domains: tuple[str, ...]
    """Of each row."""
    replayed: list[dict[int, Tally]]
    """Of each row, by k."""
    texts: TextChecks
    loop: LoopResult
    costs: StepCosts

    def replay_by_domain(self, k: int) -> dict[str, Tally]:
        """Replay's counts at k of each domain and overall."""
        return self._by_domain(k, ((row, tallies[k]) for row, tallies in enumerate(self.replayed)))

    def loop_by_domain(self) -> dict[str, Tally]:
        """The loop's counts of each domain and overall."""
        return self._by_domain(self.params.loop_draft_tokens, self.loop.tallies.items())

    def speedup_projected(self, k: int, tally: Tally) -> float:
        """Speed relative to plain decoding, with the costs measured here."""
        verify = self.costs.verify_cost(k)
        return projected_speedup(tally.acceptance_length, k, self.costs.draft_cost, verify)

    def _by_domain(self, k: int, tallies: Iterable[tuple[int, Tally]]) -> dict[str, Tally]:
        sums = {name: Tally.empty(k) for name in (Evaluation.overall, *sorted(set(self.domains)))}
        for row, tally in tallies:
            sums[Evaluation.overall] += tally
            sums[self.domains[row]] += tally
        return sums


def metrics(found: Findings) -> dict[str, float]:
    """The whole split's figures, by the names they have everywhere."""
    figures: dict[str, float] = {}
    for k in found.params.draft_tokens:
        tally = found.replay_by_domain(k)[Evaluation.overall]
        figures[f"acceptance_length_k{k}"] = tally.acceptance_length
        for position, rate in enumerate(tally.acceptance_rates):
            figures[f"acceptance_rate_k{k}_pos{position}"] = rate
        figures[f"oov_miss_rate_k{k}"] = tally.oov_miss_rate
        figures[f"drafts_k{k}"] = tally.drafts
        figures[f"verify_step_us_k{k}"] = found.costs.verify_step_us[k]
        figures[f"speedup_projected_k{k}"] = found.speedup_projected(k, tally)
    k = found.params.loop_draft_tokens
    figures["oov_miss_rate"] = figures[f"oov_miss_rate_k{k}"]
    figures[f"acceptance_length_loop_k{k}"] = found.loop_by_domain()[
        Evaluation.overall
    ].acceptance_length
    figures["loop_rows"] = len(found.loop.tallies)
    figures["loop_replay_disagreements"] = len(found.loop.count_differences)
    figures["loop_text_differences"] = len(found.loop.text_differences)
    figures["near_ties"] = len(found.texts.near_ties)
    figures["not_greedy_tokens"] = len(found.texts.not_greedy)
    figures["truncated_answers"] = found.texts.truncated
    figures["sampled_acceptance_pos0"] = found.texts.sampled_acceptance
    for name in ("draft_step_us", "draft_layer_us", "draft_head_us", "target_step_us"):
        figures[name] = getattr(found.costs, name)
    return figures


def details(found: Findings) -> dict[str, Any]:
    """Every figure by k and domain, and every difference and near-tie with its row."""
    return {
        "answers": found.texts.answers,
        "truncated_answers": found.texts.truncated,
        "replay": {
            str(k): {
                name: _tally_figures(tally)
                | {"speedup_projected": found.speedup_projected(k, tally)}
                for name, tally in found.replay_by_domain(k).items()
            }
            for k in found.params.draft_tokens
        },
        "loop": {
            "draft_tokens": found.params.loop_draft_tokens,
            "rows": len(found.loop.tallies),
            "figures": {n: _tally_figures(tally) for n, tally in found.loop_by_domain().items()},
            "replay_disagreements": [asdict(d) for d in found.loop.count_differences],
            "text_differences": [asdict(d) for d in found.loop.text_differences],
        },
        "sampled_acceptance_pos0": found.texts.sampled_acceptance,
        "costs": asdict(found.costs),
        "near_tie": found.params.near_tie,
        "near_ties": found.texts.near_ties,
        "not_greedy": found.texts.not_greedy,
    }


def acceptance_csv(found: Findings) -> str:
    """Rows of k, domain, acceptance length, for `dvc plots`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["k", "domain", "acceptance_length"])
    for k in found.params.draft_tokens:
        for name, tally in found.replay_by_domain(k).items():
            writer.writerow([k, name, f"{tally.acceptance_length:.6f}"])
    return text.getvalue()


def _replay_details(found: Findings, k: int) -> dict[str, Any]:
    return {
        name: _tally_figures(tally) | {"speedup_projected": found.speedup_projected(k, tally)}
        for name, tally in found.replay_by_domain(k).items()
    }


def _tally_figures(tally: Tally) -> dict[str, Any]:
    return {
        "acceptance_length": tally.acceptance_length,
        "acceptance_rates": list(tally.acceptance_rates),
        "oov_miss_rate": tally.oov_miss_rate,
        "drafts": tally.drafts,
        "accepted": tally.accepted,
    }
