"""Differences between replay, the real loop and greedy text are found, placed and explained."""

import numpy as np
import pytest
import torch

from eagle3.acceptance import Tally
from eagle3.agreement import Answer, close_calls, count_difference, text_difference
from eagle3.generate import Draft, Generation

NEAR = 1e-4


def answer(stored, loop, gaps):
    prompt = [9, 9]
    row = prompt + stored
    return Answer("row", slice(2, len(row)), row, Generation(loop, gaps, []))


def no_need(_):
    raise AssertionError("equal texts need no plain decoding")


def test_equal_texts_do_not_differ_and_cost_no_plain_decoding():
    assert text_difference(answer([1, 2], [1, 2], [1.0, 1.0]), NEAR, no_need) is None


@pytest.mark.parametrize(("gap", "near"), [(5e-5, True), (0.3, False)])
def test_a_text_difference_has_its_position_tokens_and_gap(gap, near):
    found = text_difference(
        answer([1, 2, 3], [1, 7, 8], [1.0, gap, 1.0]), NEAR, lambda _: [1, 7, 8]
    )
    assert (found.position, found.greedy_token, found.loop_token) == (3, 2, 7)
    assert (found.gap, found.near_tie) == (gap, near)
    assert found.loop_equals_single_row_greedy


def test_a_loop_that_stops_early_differs_at_the_token_it_did_not_write():
    found = text_difference(answer([1, 2, 3], [1, 2], [1.0, 0.5]), NEAR, lambda _: [1, 2, 3])
    assert (found.position, found.greedy_token, found.loop_token) == (4, 3, None)
    assert not found.loop_equals_single_row_greedy


def counts(replay, loop, drafts, chains, text_near_tie=False):
    return count_difference("row", replay, loop, drafts, chains.get, NEAR, text_near_tie)


def test_equal_counts_do_not_differ():
    tally = Tally(2, 3, (1, 0), 0)
    assert counts(tally, Tally(2, 3, (1, 0), 0), [], {}) is None


@pytest.mark.parametrize(("gap", "near"), [(5e-5, True), (0.3, False)])
def test_a_count_difference_names_the_first_chain_that_differs_and_how_sure_it_was(gap, near):
    drafts = [Draft(4, (1, 2), 0, (0.9, 0.9)), Draft(5, (1, 3), 1, (0.9, gap))]
    chains = {4: [1, 2], 5: [1, 6]}
    found = counts(Tally(2, 2, (1, 1), 0), Tally(2, 2, (1, 0), 0), drafts, chains)
    assert (found.drafted_from, found.replay_chain, found.loop_chain) == (5, (1, 6), (1, 3))
    assert (found.gap, found.near_tie) == (gap, near)


def test_counts_that_differ_behind_a_near_tie_of_the_text_are_explained_by_it():
    drafts = [Draft(4, (1, 2), 0, (0.9, 0.9))]
    one, other = Tally(2, 1, (1, 1), 0), Tally(2, 2, (1, 0), 0)
    assert counts(one, other, drafts, {4: [1, 2]}, text_near_tie=True).near_tie
    assert not counts(one, other, drafts, {4: [1, 2]}).near_tie


def test_near_ties_and_tokens_that_are_not_the_likeliest_are_both_listed():
    tokens = np.array([5, 0, 1, 2])
    logits = torch.tensor([[3.0, 1.0, 0.0], [2.0, 1.99995, 0.0], [4.0, 0.0, 1.0]])
    near, strange = close_calls("row", tokens, slice(1, 4), logits, NEAR)
    assert [(call["position"], call["tokens"]) for call in near] == [(2, [0, 1])]
    assert near[0]["gap"] == pytest.approx(5e-5, rel=1e-2)
    # Position 2 has the second of a near-tie, position 3 a token that greedy text cannot have.
    assert [(call["position"], call["token"]) for call in strange] == [(2, 1), (3, 2)]
