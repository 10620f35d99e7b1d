"""The hot path, on a CPU in float64, against the slow reference of test_ttt."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_batches import MASKS, toy_batch
from toys import NORM_SHAPE, SHAPES, TOY_SHAPE

from eagle3.config import Loss
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.maps import VocabMaps
from eagle3.ttt import Batch, plan_unrolling, unroll

STEPS = 4
WEIGHTS = [0.8**step for step in range(STEPS)]


def plain(
    net: DrafterNet,
    batch: Batch,
    embedding_VH: Tensor,
    head: TargetHead,
    maps: VocabMaps,
    loss: Loss = "cross_entropy",
) -> tuple[Tensor, Tensor]:
    """Loss and hits of each step, and gradients, by the plain path."""
    unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, STEPS)
    prediction = predict_target(head, maps, batch.last_NH[unrolling.predictors_U], loss)
    nats, hits = [], []
    for step, state in unroll(net, batch, embedding_VH[batch.tokens_N], unrolling):
        hidden = net.head_input(state[step.counted_M])
        total, agreed = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
        nats.append(total)
        hits.append(agreed)
    sum(w * n for w, n in zip(WEIGHTS, nats, strict=True)).backward()
    return torch.stack(nats).detach(), torch.stack(hits)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("masks", [MASKS, ("1" * 9,), ("0" * 4, "1" * 5), ("0011", "011")])
def test_loss_hits_and_every_gradient_equal_those_of_the_plain_path(
    seed: int, masks: tuple[str, ...]
) -> None:
    net, batch, embedding, head, maps = toy_batch(seed, masks)
    nats, hits = plain(net, batch, embedding, head, maps)
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    figures = HotPath(net, embedding, head, maps).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S, nats, rtol=1e-12, atol=1e-12)
    assert figures.hits_S.tolist() == hits.tolist()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("norms", "loss"),
    [
        ("fc_norm", "cross_entropy"),
        ("norm_output", "cross_entropy"),
        ("eagle3.1", "tv"),
        ("eagle3", "tv"),
        ("eagle3", "lk_alpha"),
    ],
)
def test_norms_and_losses_equal_those_of_the_plain_path(norms: str, loss: Loss) -> None:
    net, batch, embedding, head, maps = toy_batch(shape=SHAPES[norms])
    nats, hits = plain(net, batch, embedding, head, maps, loss)
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    figures = HotPath(net, embedding, head, maps, loss).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S, nats, rtol=1e-12, atol=1e-12)
    assert figures.hits_S.tolist() == hits.tolist()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


def test_a_batch_without_supervision_adds_no_gradient() -> None:
    net, batch, embedding, head, maps = toy_batch(masks=("0000",))
    figures = HotPath(net, embedding, head, maps).backward(batch, WEIGHTS)

    assert figures.nats_S.tolist() == [0.0] * STEPS
    assert figures.counted == (0,) * STEPS
    assert all(parameter.grad is None for parameter in net.parameters())


def test_two_batches_add_their_gradients() -> None:
    net, batch, embedding, head, maps = toy_batch()
    hot = HotPath(net, embedding, head, maps)
    hot.backward(batch, WEIGHTS)
    once = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    hot.backward(batch, WEIGHTS)

    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    net, batch, embedding, head, maps = toy_batch()
    hot = HotPath(net, embedding, head, maps)
    hot.backward(batch, WEIGHTS)
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    net.lm_head.weight.requires_grad_(False)
    hot.backward(batch, WEIGHTS)

    assert net.lm_head.weight.grad is None
    for name, parameter in net.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize(
    ("shape", "loss"), [(TOY_SHAPE, "cross_entropy"), (TOY_SHAPE, "lk_alpha"), (NORM_SHAPE, "tv")]
)
def test_bf16_products_keep_float32_gradients_and_stay_near_the_loss(
    shape: DraftShape, loss: Loss
) -> None:
    # Not seed 0: one of its targets changes its first choice in bfloat16, and rows with it.
    net, batch, embedding, head, maps = toy_batch(1, shape=shape)
    exact = HotPath(net, embedding, head, maps, loss).backward(batch, WEIGHTS)
    net.zero_grad(set_to_none=True)
    net.float()
    narrow = torch.bfloat16
    head = replace(head, norm_H=head.norm_H.to(narrow), head_VH=head.head_VH.to(narrow))
    batch = replace(batch, aux_N3H=batch.aux_N3H.to(narrow), last_NH=batch.last_NH.to(narrow))
    figures = HotPath(net, embedding.to(narrow), head, maps, loss).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S.double(), exact.nats_S, rtol=0.03, atol=0.0)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
