"""The hot path in bf16 on a GPU, with its kernels, against the plain path in float32 there."""

from dataclasses import replace

import pytest
import torch
from toy_batches import toy_batch
from toys import TOY_SHAPE

from eagle3.config import Loss
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.ttt import plan_unrolling, unroll

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

STEPS = 5
WEIGHTS = [0.8**step for step in range(STEPS)]
SHAPE = replace(
    TOY_SHAPE,
    hidden_size=512,
    vocab_size=4096,
    draft_vocab=1000,
    intermediate_size=768,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
)
ONE = ("0" * 100 + "1" * 412,)
SEVERAL = ("0" * 40 + "1" * 90 + "0" * 30 + "1" * 40, "1" * 77, "0" * 99 + "1", "0" * 12)


@pytest.mark.parametrize("masks", [ONE, SEVERAL])
@pytest.mark.parametrize(
    ("norms", "loss", "frozen"),
    [
        ({}, "cross_entropy", False),
        ({}, "cross_entropy", True),
        ({"fc_norm": True}, "cross_entropy", False),
        ({"norm_output": True}, "lk_alpha", False),
        ({"fc_norm": True, "norm_output": True}, "tv", False),
    ],
)
def test_losses_and_gradients_are_those_of_float32(
    norms: dict[str, bool], loss: Loss, frozen: bool, masks: tuple[str, ...]
) -> None:
    net, batch, embedding, head, maps = toy_batch(masks=masks, shape=replace(SHAPE, **norms))
    net = net.float().cuda()
    with torch.no_grad():
        for parameter in net.parameters():
            # Of a size that keeps states near one, and values that bf16 holds exactly.
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
            parameter.copy_((parameter * 2.5 * scale).bfloat16())
    net.lm_head.weight.requires_grad_(not frozen)
    # Longer rows, so that the target's argmax has a draft id: a near-tie with a token that has none
    # counts a row in one precision and not in the other.
    head.head_VH[maps.ids_D] *= 3
    narrow = [x.bfloat16().cuda() for x in (embedding, head.norm_H, head.head_VH * 0.03)]
    batch = replace(
        batch,
        tokens_N=batch.tokens_N.cuda(),
        loss_mask_N=batch.loss_mask_N.cuda(),
        aux_N3H=batch.aux_N3H.bfloat16().cuda(),
        last_NH=batch.last_NH.bfloat16().cuda(),
    )
    hot = HotPath(net, narrow[0], TargetHead(narrow[1], head.eps, narrow[2]), maps, loss)
    figures = hot.backward(batch, WEIGHTS)
    found = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)

    wide = batch.with_states_as(torch.float32)
    unrolling = plan_unrolling(wide.loss_mask_N, wide.documents, STEPS)
    target = TargetHead(narrow[1].float(), head.eps, narrow[2].float())
    prediction = predict_target(target, maps, wide.last_NH[unrolling.predictors_U], loss)
    nats = []
    for step, state in unroll(net, wide, narrow[0].float()[wide.tokens_N], unrolling):
        hidden = net.head_input(state[step.counted_M])
        total, _ = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
        nats.append(total)
    sum(w * n for w, n in zip(WEIGHTS, nats, strict=True)).backward()

    torch.testing.assert_close(figures.nats_S.float(), torch.stack(nats), rtol=5e-3, atol=1e-2)
    for name, parameter in net.named_parameters():
        expected, here = parameter.grad, found[name]
        if expected is None:
            assert here is None, name
            continue
        error = (here - expected).norm() / expected.norm()
        # The gradients of tv and lk_alpha jump where the drafter's probability passes the target's.
        assert error < (0.03 if loss == "cross_entropy" else 0.08), f"{name}: off by {error:.3f}"
