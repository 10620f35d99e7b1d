import pytest

from eagle3.acceptance import Tally
from eagle3.engines.counters import NOTHING_COUNTED, SpecCounters
from eagle3.engines.served import Served
from eagle3.served_figures import PLAIN, Difference, ServedRun, Turn, details, metrics

TURNS = {
    "chat": [Turn(0, "chat", [1, 5], [7, 8, 2]), Turn(1, "chat", [1, 6], [9, 2])],
    "code": [Turn(2, "code", [1, 4], [3, 3, 3, 2])],
}
COUNTERS = {
    "chat": SpecCounters(4, 8, 3, (2, 1)),
    "code": SpecCounters(6, 12, 2, (2, 0)),
}
REPLAYED = {2: Tally(2, 10, (4, 1), 0)}


def run(k: int, temperature: float, batch: int, domain: str, seconds: float) -> ServedRun:
    turns = TURNS[domain]
    counters = NOTHING_COUNTED if k == PLAIN else COUNTERS[domain]
    served = Served([turn.stored for turn in turns], seconds, counters)
    return ServedRun(k, temperature, batch, domain, turns, served)


def runs() -> list[ServedRun]:
    """Nine tokens in 9 s without the drafter, in 6 s with it; sampled takes twice as long."""
    seconds = {(PLAIN, "chat"): 5.0, (PLAIN, "code"): 4.0, (2, "chat"): 3.0, (2, "code"): 3.0}
    return [
        run(k, temperature, batch, domain, seconds[k, domain] * (1 if temperature == 0 else 2))
        for k in (PLAIN, 2)
        for temperature in (0.0, 1.0)
        for batch in (1, 8)
        for domain in ("chat", "code")
    ]


def test_acceptance_is_over_all_drafts_and_not_a_mean_of_domains():
    figures = metrics(runs(), [], REPLAYED)

    assert figures["acceptance_length_served_k2"] == pytest.approx(1 + 5 / 10)
    assert figures["acceptance_rate_served_k2_pos0"] == pytest.approx(4 / 10)
    assert figures["acceptance_rate_served_k2_pos1"] == pytest.approx(1 / 10)


def test_speedup_is_tokens_per_second_with_over_without_the_drafter():
    figures = metrics(runs(), [], REPLAYED)

    assert figures["tokens_per_second_plain"] == pytest.approx(1.0)
    assert figures["speedup_served_k2"] == pytest.approx(1.5)
    assert figures["speedup_served_batch8_k2"] == pytest.approx(1.5)
    assert figures["tokens_per_second_served_sampled1_k2"] == pytest.approx(0.75)


def test_served_is_set_beside_replay_of_the_same_prompts():
    figures = metrics(runs(), [], REPLAYED)

    assert figures["acceptance_length_same_prompts_k2"] == pytest.approx(1.5)
    assert figures["served_minus_replay_k2"] == pytest.approx(0.0)


def test_a_changed_answer_lowers_losslessness_and_is_listed():
    changed = Difference(k=2, batch=8, domain="chat", row=1, at=1, top_two_gap=0.3)

    figures = metrics(runs(), [changed], REPLAYED)
    listed = details(runs(), [changed], REPLAYED)["differences"]

    # Three answers at each of two batch sizes.
    assert figures["lossless_served_k2"] == pytest.approx(5 / 6)
    assert [(entry["row"], entry["at"]) for entry in listed] == [(1, 1)]


def test_answers_other_than_the_corpus_has_are_seen():
    others = runs()
    others[0] = ServedRun(
        PLAIN, 0.0, 1, "chat", TURNS["chat"], Served([[7, 8, 2], [1]], 5.0, NOTHING_COUNTED)
    )

    figures = metrics(others, [], REPLAYED)

    assert figures["answers_as_stored"] == pytest.approx(2 / 3)


def test_every_run_keeps_its_domain_and_counts():
    entries = details(runs(), [], REPLAYED)["runs"]

    assert len(entries) == 16
    code = next(entry for entry in entries if entry["domain"] == "code" and entry["k"] == 2)
    assert code["accepted_at"] == (2, 0)
    assert code["acceptance_length"] == pytest.approx(1 + 2 / 6)


def test_a_server_of_the_users_is_measured_without_the_target_alone_and_without_replay():
    with_drafter = [run for run in runs() if run.k == 2]

    figures = metrics(with_drafter, [], {})

    assert figures["acceptance_length_served_k2"] == pytest.approx(1.5)
    assert not [name for name in figures if "speedup" in name or "lossless" in name]
