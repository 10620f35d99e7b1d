"""What is timed, and that timing leaves no trace; the times themselves are the machine's."""

import pytest
import torch

from eagle3.cost import StepCosts, Stopwatch, measure_costs
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.generate import DraftDecoder, TargetDecoder
from eagle3.maps import full_vocab

CONTEXT = [1, 40, 41, 42, 43, 44]


@pytest.fixture
def decoders(tiny_target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval().requires_grad_(False)
    torch.manual_seed(0)
    net = DrafterNet(
        DraftShape(
            hidden_size=32,
            vocab_size=320,
            draft_vocab=320,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=512,
        )
    )
    embedding = model.get_input_embeddings().weight.detach()
    return TargetDecoder(model, (2, 4, 5)), DraftDecoder(net, embedding, full_vocab(320))


def test_every_step_is_timed_after_the_same_context(decoders):
    target, drafter = decoders
    costs = measure_costs(target, drafter, CONTEXT, draft_tokens=(1, 3), repeats=3)

    assert costs.context == target.length == len(CONTEXT)
    # The last token's row waits for the token after it.
    assert drafter.cache.length == len(CONTEXT) - 1
    assert sorted(costs.verify_step_us) == [1, 3]
    times = [costs.draft_step_us, costs.draft_layer_us, costs.draft_head_us, costs.target_step_us]
    assert all(time > 0 for time in [*times, *costs.verify_step_us.values()])
    assert costs.draft_step_us >= max(costs.draft_layer_us, costs.draft_head_us)


def test_a_stopwatch_hands_on_what_a_step_returns():
    assert Stopwatch(torch.device("cpu")).time("sum", lambda: 1 + 1) == 2


def test_the_median_of_two_steps_is_that_of_their_sums():
    watch = Stopwatch(torch.device("cpu"))
    watch.seconds = {"one": [1e-6, 9e-6, 2e-6], "two": [8e-6, 1e-6, 3e-6]}
    assert watch.median_us("one") == pytest.approx(2.0)
    assert watch.median_us("one", "two") == pytest.approx(9.0)


def test_costs_are_relative_to_a_plain_target_step():
    costs = StepCosts(
        context=9,
        draft_step_us=20.0,
        draft_layer_us=5.0,
        draft_head_us=15.0,
        target_step_us=100.0,
        verify_step_us={1: 110.0, 3: 130.0},
    )
    assert costs.draft_cost == pytest.approx(0.2)
    assert costs.verify_cost(3) == pytest.approx(1.3)
