"""The maths of acceptance against loops that say it naively."""

import numpy as np
import pytest
import torch

from eagle3.acceptance import (
    Tally,
    accepted_tokens,
    drafting_rows,
    matches,
    projected_speedup,
    sampled_acceptance,
    supervised_spans,
    tally_answer,
    walk,
)

RANDOM = [np.random.default_rng(seed) for seed in range(60)]


def naive_decode(chain_of, tokens, span, in_draft, k):
    """Speculative decoding of a known answer, written down: (drafts, per position, oov)."""
    last = span.stop - 1
    known = span.start  # the prefill gave the first answer token
    drafts, accepted_at, oov = 0, [0] * k, 0
    while known < last:
        drafts += 1
        accepted = 0
        for token in chain_of[known - 1][:k]:
            place = known + 1 + accepted
            if place > last or token != tokens[place]:
                break
            accepted_at[accepted] += 1
            accepted += 1
        missed = known + 1 + accepted
        if accepted < k and missed <= last and not in_draft[tokens[missed]]:
            oov += 1
        known += accepted + 1
    return drafts, tuple(accepted_at), oov


def random_answer(rng, steps):
    length = int(rng.integers(2, 30))
    start = int(rng.integers(1, length))
    span = slice(start, int(rng.integers(start + 1, length + 1)))
    tokens = rng.integers(0, 3, size=length)  # three tokens: chance accepts a third of the drafts
    chains = rng.integers(0, 3, size=(max(span.stop - span.start - 1, 0), steps))
    in_draft = rng.random(3) < 0.7
    return tokens, span, chains, in_draft


@pytest.mark.parametrize("rng", RANDOM)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_tally_equals_decoding_written_down_naively(rng, k):
    tokens, span, chains, in_draft = random_answer(rng, steps=5)
    chain_of = dict(zip(drafting_rows(span).tolist(), chains.tolist(), strict=True))

    tally = tally_answer(chains, tokens, span, in_draft, k)

    expected = naive_decode(chain_of, tokens, span, in_draft, k)
    assert (tally.drafts, tally.accepted_at, tally.oov_misses) == expected


@pytest.mark.parametrize("rng", RANDOM)
def test_acceptance_length_is_one_plus_the_sum_of_the_position_rates(rng):
    tokens, span, chains, in_draft = random_answer(rng, steps=5)
    tally = tally_answer(chains, tokens, span, in_draft, 5)
    assert tally.acceptance_length == pytest.approx(1 + sum(tally.acceptance_rates), abs=1e-12)


@pytest.mark.parametrize("rng", RANDOM)
def test_every_answer_token_is_either_prefilled_accepted_or_the_targets_own(rng):
    tokens, span, chains, in_draft = random_answer(rng, steps=5)
    tally = tally_answer(chains, tokens, span, in_draft, 3)
    # The last draft's own token may fall behind the answer's end.
    assert tally.drafts + tally.accepted - (span.stop - span.start - 1) in (0, 1)


def test_a_drafter_that_is_never_accepted_scores_one():
    tokens = np.zeros(10, dtype=np.int64)
    chains = np.ones((5, 3), dtype=np.int64)
    tally = tally_answer(chains, tokens, slice(4, 10), np.array([True, True]), 3)
    assert (tally.acceptance_length, tally.drafts) == (1.0, 5)


def test_a_perfect_drafter_is_cut_only_by_the_end_of_the_answer():
    tokens = np.arange(20)
    span = slice(4, 14)  # nine tokens to draft, positions 5..13
    chains = drafting_rows(span)[:, None] + 2 + np.arange(3)
    tally = tally_answer(chains, tokens, span, np.ones(20, dtype=bool), 3)
    # 3 accepted + 1 own, twice; then 1 token is left: accepted, and two drafted past the end.
    assert (tally.drafts, tally.accepted_at) == (3, (3, 2, 2))


def test_the_first_chain_starts_at_the_last_prompt_position():
    assert drafting_rows(slice(4, 8)).tolist() == [3, 4, 5]


def test_an_answer_of_one_token_needs_no_draft():
    tally = tally_answer(
        np.zeros((0, 3), dtype=np.int64), np.arange(5), slice(4, 5), np.ones(5, dtype=bool), 3
    )
    assert tally == Tally.empty(3)
    assert tally.acceptance_length == 1.0


def test_a_proposal_past_the_end_of_the_answer_never_matches():
    tokens = np.array([7, 7, 7, 7, 7])
    found = matches(np.full((2, 3), 7), tokens, slice(1, 4))
    assert found.tolist() == [[True, True, False], [True, False, False]]


def test_a_match_after_a_miss_is_not_accepted():
    assert accepted_tokens(np.array([[True, False, True], [False, True, True]]), 3).tolist() == [
        1,
        0,
    ]


def test_a_walk_skips_the_rows_that_an_accepted_draft_covers():
    assert walk(np.array([0, 2, 9, 9, 1, 0, 0])).tolist() == [0, 1, 4, 6]


def test_a_miss_counts_as_out_of_vocabulary_only_where_the_target_wrote_such_a_token():
    tokens = np.array([0, 0, 5, 1, 5])
    in_draft = np.array([True, True, True, True, True, False])
    chains = np.array([[2], [2], [2]])  # wrong everywhere; the answer has 5 at positions 2 and 4
    tally = tally_answer(chains, tokens, slice(1, 5), in_draft, 1)
    assert (tally.drafts, tally.oov_misses) == (3, 2)
    assert tally.oov_miss_rate == pytest.approx(2 / 3)


def test_tallies_add_up_over_drafts_not_over_answers():
    long, short = Tally(2, 9, (9, 9), 0), Tally(2, 1, (0, 0), 1)
    total = long + short
    assert total == Tally(2, 10, (9, 9), 1)
    assert total.acceptance_length == pytest.approx(2.8)


def test_each_turn_of_a_row_is_an_answer_of_its_own():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], dtype=bool)
    assert supervised_spans(mask) == [slice(1, 3), slice(5, 6), slice(7, 8)]
    assert supervised_spans(np.zeros(3, dtype=bool)) == []


def test_sampled_acceptance_counts_what_the_draft_vocabulary_lacks_against_it():
    p = torch.tensor([[0.5, 0.1, 0.4]])
    alpha = sampled_acceptance(p.log(), torch.tensor([[0.9, 0.1]]).log(), torch.tensor([0, 1]))
    # Renormalised to the two tokens, p would be (5/6, 1/6) and alpha 0.93.
    assert alpha.tolist() == pytest.approx([0.5 + 0.1])


def test_sampled_acceptance_equals_the_rate_of_rejection_sampling():
    torch.manual_seed(0)
    p, q = torch.randn(1, 8), torch.randn(1, 4)
    ids = torch.tensor([1, 3, 4, 6])
    draws = torch.multinomial(q.softmax(-1)[0], 200_000, replacement=True)
    ratio = p.softmax(-1)[0, ids[draws]] / q.softmax(-1)[0, draws]
    taken = (torch.rand(200_000) < ratio).float().mean()
    assert sampled_acceptance(p, q, ids).item() == pytest.approx(taken.item(), abs=5e-3)


def test_a_free_drafter_and_a_free_check_speed_up_by_the_acceptance_length():
    assert projected_speedup(2.5, 3, draft_cost=0.0, verify_cost=1.0) == 2.5
    assert projected_speedup(2.5, 3, draft_cost=0.1, verify_cost=1.2) == pytest.approx(2.5 / 1.5)
