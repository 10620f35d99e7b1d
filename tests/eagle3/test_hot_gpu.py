"""The hot path in bf16 on a GPU, with its kernels, against the plain path in float32 there."""

from dataclasses import replace

import pytest
import torch
from toy_batches import toy_batch
from toys import TOY_SHAPE

from eagle3.config import HeadProducts, Loss
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.ttt import plan_unrolling, unroll

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

STEPS = 5
WEIGHTS = [0.8**step for step in range(STEPS)]
ALLOWED: dict[HeadProducts, tuple[float, float]] = {"dtype": (0.03, 0.08), "float8": (0.1, 0.2)}
"""Error of a gradient: of cross-entropy; and of tv and lk_alpha, whose gradients jump where the
drafter's probability passes the target's. In float8 e5m2 is off by 5% of each logit's gradient and
e4m3 by 2.6% of each weight, in the mean of squares."""
SHAPE = replace(
    TOY_SHAPE,
    hidden_size=512,
    vocab_size=4096,
    draft_vocab=1008,
    intermediate_size=768,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
)
ONE = ("0" * 100 + "1" * 412,)
SEVERAL = ("0" * 40 + "1" * 90 + "0" * 30 + "1" * 40, "1" * 77, "0" * 99 + "1", "0" * 12)


@pytest.mark.parametrize("masks", [ONE, SEVERAL])
@pytest.mark.parametrize(
    ("norms", "loss", "frozen", "head_products"),
    [
        ({}, "cross_entropy", False, "dtype"),
        ({}, "cross_entropy", True, "dtype"),
        ({"fc_norm": True}, "cross_entropy", False, "dtype"),
        ({"norm_output": True}, "lk_alpha", False, "dtype"),
        ({"fc_norm": True, "norm_output": True}, "tv", False, "dtype"),
        ({}, "cross_entropy", False, "float8"),
        ({}, "cross_entropy", True, "float8"),
        ({"norm_output": True}, "lk_alpha", False, "float8"),
        ({"fc_norm": True, "norm_output": True}, "tv", True, "float8"),
    ],
)
def test_losses_and_gradients_are_those_of_float32(
    norms: dict[str, bool],
    loss: Loss,
    frozen: bool,
    head_products: HeadProducts,
    masks: tuple[str, ...],
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
    given = (narrow[0], TargetHead(narrow[1], head.eps, narrow[2]), maps, loss)
    hot = HotPath(net, *given, head_products=head_products)
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
    if loss == "cross_entropy":
        total, exact = (
            sum(w * n for w, n in zip(WEIGHTS, x, strict=True)) for x in (figures.nats_S, nats)
        )
        assert abs(total / exact - 1) < 1e-3
    for name, parameter in net.named_parameters():
        expected, here = parameter.grad, found[name]
        if expected is None:
            assert here is None, name
            continue
        error = (here - expected).norm() / expected.norm()
        allowed = ALLOWED[head_products][loss != "cross_entropy"]
        assert error < allowed, f"{name}: off by {error:.3f}"
