"""The target in vLLM against the target in transformers: the same answers, the same states."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3.artifacts import Corpus, TargetModel
from eagle3.engines.base import Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.engines.vllm import VllmEngine
from eagle3.store.rows import load_rows
from eagle3.target import end_token_ids, read_final_norm, read_head, target_logits

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=24, seed=0)


@pytest.fixture(scope="module")
def vllm(project) -> Iterator[VllmEngine]:
    with VllmEngine(project.target, project.target_params, 256, Path("logs/vllm.log")) as engine:
        yield engine


@pytest.fixture(scope="module")
def rows(project) -> list[list[int]]:
    """Twenty eval and training rows; many begin with the same tokens."""
    found = []
    for split in ("eval", "train"):
        stored = load_rows(Corpus.home / f"{split}.zarr")
        found += [stored.tokens_N[stored.span(row)].tolist() for row in range(len(stored))]
    assert len(found) >= 20
    return found[:20]


@pytest.fixture(scope="module")
def prompts(rows) -> list[list[int]]:
    return [row[:12] for row in rows[:8]]


def test_greedy_answers_are_those_of_transformers(project, vllm, prompts):
    reference = TransformersEngine(project.target, project.target_params)

    assert vllm.generate(prompts, GREEDY) == reference.generate(prompts, GREEDY)


def test_almost_cold_sampling_says_what_greedy_says(vllm, prompts):
    # The CPU build's rejection sampler read its temperature from unset memory; see
    # eagle3_cpu_sampling.
    cold = Sampling(temperature=0.01, top_p=1.0, max_new_tokens=24, seed=3)

    assert vllm.generate(prompts, cold) == vllm.generate(prompts, GREEDY)


def test_sampled_answers_repeat_for_a_seed_and_differ_between_seeds(vllm, prompts):
    warm = Sampling(temperature=0.8, top_p=1.0, max_new_tokens=24, seed=3)
    other = Sampling(temperature=0.8, top_p=1.0, max_new_tokens=24, seed=4)

    answers = vllm.generate(prompts, warm)
    assert vllm.generate(prompts, warm) == answers
    assert vllm.generate(prompts, other) != answers


@pytest.mark.parametrize("batch", [1, 8])
def test_states_are_those_of_transformers_by_the_logits_they_give(project, vllm, rows, batch):
    reference = TransformersEngine(project.target, project.target_params).states(rows)
    norm_H, eps = read_final_norm(project.target)
    head_VH = read_head(project.target)

    found = [
        states
        for start in range(0, len(rows), batch)
        for states in vllm.states(rows[start : start + batch])
    ]

    for row, mine, theirs in zip(rows, found, reference, strict=True):
        assert mine.aux_T3H.shape == (len(row), 3, project.target.hidden_size)
        torch.testing.assert_close(mine.aux_T3H, theirs.aux_T3H, rtol=1e-4, atol=1e-4)
        logits = [target_logits(s.last_TH, norm_H, eps, head_VH) for s in (mine, theirs)]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        # Hot and long: some of these end by themselves, and some are cut.
        Sampling(temperature=2.0, top_p=1.0, max_new_tokens=100, seed=0),
    ],
)
def test_states_kept_while_answering_are_those_of_a_pass_of_their_own(project, vllm, sampling):
    prompts = [[1, *range(40, 41 + number % 5)] for number in range(12)]
    answers, found = vllm.generate_with_states(prompts, sampling)

    assert answers == vllm.generate(prompts, sampling)
    if sampling is not GREEDY:
        ends = end_token_ids(project.target)
        assert {answer[-1] in ends for answer in answers} == {True, False}
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for mine, theirs in zip(found, vllm.states(rows), strict=True):
        torch.testing.assert_close(mine.aux_T3H, theirs.aux_T3H, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.last_TH, theirs.last_TH, rtol=1e-4, atol=1e-4)


def test_the_engine_names_its_version(vllm):
    assert vllm.name.startswith("vllm 0.")


def test_the_target_is_found_where_it_lies(project):
    assert project.target.folder(TargetModel.home).is_dir()
