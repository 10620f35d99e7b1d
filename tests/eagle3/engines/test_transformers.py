"""The transformers engine: greedy text that a batch does not change, states that explain logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.engines.base import Sampling
from eagle3.engines.transformers import TransformersEngine, find_decoder
from eagle3.errors import TargetError
from eagle3.target import (
    bring_target,
    end_token_ids,
    load_model,
    read_final_norm,
    read_head,
    target_logits,
)

PROMPTS = [[1, 50, 60, 70], [1, 80], [1, 90, 91, 92, 93, 94, 95], [1, 44, 45]]
GREEDY = Sampling(temperature=0, top_p=1.0, max_new_tokens=12, seed=0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=12, seed=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "data" / "target"


@pytest.fixture(scope="module")
def params(tiny_target: Path) -> TargetParams:
    return TargetParams.model_validate(
        {
            "source": str(tiny_target),
            "shape": {"num_layers": 8, "hidden_size": 32, "vocab_size": 320},
            "aux_layers": "default",
            "weights": "copy",
            "trust_remote_code": False,
            "dtype": "float32",
            "device": "cpu",
        }
    )


@pytest.fixture(scope="module")
def target(params: TargetParams, home: Path) -> TargetModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home.parents[1])
        return bring_target(params, home)


@pytest.fixture(scope="module")
def engine(target: TargetModel, params: TargetParams, home: Path) -> TransformersEngine:
    return TransformersEngine(target, params, home)


@pytest.fixture(scope="module")
def model(target: TargetModel, params: TargetParams, home: Path) -> Any:
    return load_model(target, params, home)


def greedy_by_hand(model: Any, prompt: list[int], ends: frozenset[int]) -> list[int]:
    """The whole text through the model again for every token: no cache, no batch."""
    answer: list[int] = []
    while len(answer) < GREEDY.max_new_tokens and not (answer and answer[-1] in ends):
        logits = model(torch.tensor([prompt + answer])).logits[0, -1]
        answer.append(int(logits.argmax()))
    return answer


def test_greedy_answers_of_a_batch_equal_decoding_each_alone(
    engine: TransformersEngine, model: Any, target: TargetModel, home: Path
) -> None:
    ends = end_token_ids(target, home)

    assert engine.generate(PROMPTS, GREEDY) == [greedy_by_hand(model, p, ends) for p in PROMPTS]


def test_an_answer_keeps_its_end_token_and_no_padding(
    engine: TransformersEngine, target: TargetModel, home: Path
) -> None:
    ends = end_token_ids(target, home)
    long = Sampling(temperature=2.0, top_p=1.0, max_new_tokens=100, seed=0)
    answers = engine.generate([[1, token] for token in range(40, 80)], long)

    ended = [answer for answer in answers if len(answer) < long.max_new_tokens]
    assert ended, "with 40 answers of up to 100 tokens, some end"
    assert all(answer[-1] in ends for answer in ended)
    assert all(token not in ends for answer in answers for token in answer[:-1])


def test_a_sampled_call_can_be_repeated_alone(engine: TransformersEngine) -> None:
    first = engine.generate(PROMPTS, SAMPLED)
    torch.manual_seed(99)
    engine.generate(PROMPTS[:2], SAMPLED)

    assert engine.generate(PROMPTS, SAMPLED) == first


def test_another_seed_samples_another_text(engine: TransformersEngine) -> None:
    other = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=12, seed=4)

    assert engine.generate(PROMPTS, other) != engine.generate(PROMPTS, SAMPLED)


def test_generation_leaves_the_callers_random_numbers_alone(engine: TransformersEngine) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    torch.manual_seed(7)
    engine.generate(PROMPTS, SAMPLED)

    assert torch.rand(3).tolist() == expected


def test_sampling_reaches_tokens_beyond_the_fifty_likeliest(
    engine: TransformersEngine, model: Any
) -> None:
    one = Sampling(temperature=2.0, top_p=1.0, max_new_tokens=1, seed=0)
    drawn = {answer[0] for answer in engine.generate([[1, 50]] * 400, one)}
    likeliest = model(torch.tensor([[1, 50]])).logits[0, -1].topk(50).indices.tolist()

    assert drawn - set(likeliest)


def test_no_prompts_give_no_answers(engine: TransformersEngine) -> None:
    assert engine.generate([], GREEDY) == []


def test_aux_states_equal_running_the_layers_one_by_one(
    engine: TransformersEngine, model: Any, target: TargetModel
) -> None:
    [states] = engine.states(PROMPTS[2:3])
    decoder, ids = model.model, torch.tensor(PROMPTS[2:3])
    hidden = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    after = [hidden]
    for layer in decoder.layers:
        after.append(layer(after[-1], attention_mask=None, position_embeddings=rotary))

    for place, layer_id in enumerate(target.aux_layers):
        torch.testing.assert_close(states.aux_T3H[:, place], after[layer_id][0])
    torch.testing.assert_close(states.last_TH, after[-1][0])


def test_head_and_norm_of_the_last_state_give_the_logits_of_the_model(
    engine: TransformersEngine, model: Any, target: TargetModel, home: Path
) -> None:
    [states] = engine.states(PROMPTS[:1])
    norm_H, eps = read_final_norm(target, home)
    found = target_logits(states.last_TH, norm_H, eps, read_head(target, home))

    expected = model(torch.tensor(PROMPTS[:1])).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_states_of_a_row_do_not_depend_on_the_rows_beside_it(
    engine: TransformersEngine,
) -> None:
    together = engine.states(PROMPTS)

    for row, states in zip(PROMPTS, together, strict=True):
        [alone] = engine.states([row])
        assert torch.equal(alone.aux_T3H, states.aux_T3H)
        assert torch.equal(alone.last_TH, states.last_TH)


def test_rows_in_one_batch_have_the_states_of_each_alone(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = engine.states(PROMPTS)
    monkeypatch.setattr(engine, "batches_rows", True)

    assert len({len(row) for row in PROMPTS}) > 1, "rows that need padding"
    for states, expected in zip(engine.states(PROMPTS), alone, strict=True):
        torch.testing.assert_close(states.aux_T3H, expected.aux_T3H, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states.last_TH, expected.last_TH, rtol=1e-4, atol=1e-4)


def test_the_decoder_is_found_under_a_multimodal_wrapper(model: Any) -> None:
    vision = torch.nn.Module()
    vision.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24)] * 8)
    vision.norm = torch.nn.LayerNorm(24, bias=False)
    wrapper = torch.nn.ModuleDict({"vision_tower": vision, "language_model": model})
    wrapper.config = model.config

    assert find_decoder(wrapper) is model.model


def test_a_model_without_a_decoder_stack_is_refused(model: Any) -> None:
    headless = torch.nn.Linear(32, 32)
    headless.config = model.config

    with pytest.raises(TargetError, match=r"`layers`.*set target.source to another model"):
        find_decoder(headless)
