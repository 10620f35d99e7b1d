"""The hot path, on a CPU in float64, against the slow reference of test_ttt."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toys import NORM_SHAPE, SHAPES
from toys import TOY_SHAPE as SHAPE

from eagle3.attention import Documents
from eagle3.config import Loss
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.maps import VocabMaps
from eagle3.ttt import Batch, plan_unrolling, unroll

H, V, D, STEPS = 8, 23, 11, 4
WEIGHTS = [0.8**step for step in range(STEPS)]
MASKS = ("0001111001110", "0011111", "000010", "00000")


Toy = tuple[DrafterNet, Batch, Tensor, TargetHead, VocabMaps]


def toy(seed: int, masks: tuple[str, ...], shape: DraftShape = SHAPE) -> Toy:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    net = DrafterNet(shape).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(randn(*parameter.shape) * 0.4)
    mask = torch.tensor([c == "1" for row in masks for c in row])
    bounds = [0]
    for row in masks:
        bounds.append(bounds[-1] + len(row))
    batch = Batch(
        tokens_N=torch.randint(V, (len(mask),), generator=generator),
        loss_mask_N=mask,
        aux_N3H=randn(len(mask), 3, H),
        last_NH=randn(len(mask), H),
        documents=Documents(tuple(bounds)),
    )
    ids = torch.randperm(V, generator=generator)[:D].sort().values
    kept = torch.zeros(V, dtype=torch.bool)
    kept[ids] = True
    maps = VocabMaps(ids - torch.arange(D), kept)
    head = TargetHead(randn(H).abs(), 1e-5, randn(V, H))
    return net, batch, randn(V, H), head, maps


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
    net, batch, embedding, head, maps = toy(seed, masks)
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
    net, batch, embedding, head, maps = toy(0, MASKS, SHAPES[norms])
    nats, hits = plain(net, batch, embedding, head, maps, loss)
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    figures = HotPath(net, embedding, head, maps, loss).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S, nats, rtol=1e-12, atol=1e-12)
    assert figures.hits_S.tolist() == hits.tolist()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)


def test_a_batch_without_supervision_adds_no_gradient() -> None:
    net, batch, embedding, head, maps = toy(0, ("0000",))
    figures = HotPath(net, embedding, head, maps).backward(batch, WEIGHTS)

    assert figures.nats_S.tolist() == [0.0] * STEPS
    assert figures.counted == (0,) * STEPS
    assert all(parameter.grad is None for parameter in net.parameters())


def test_two_batches_add_their_gradients() -> None:
    net, batch, embedding, head, maps = toy(0, MASKS)
    hot = HotPath(net, embedding, head, maps)
    hot.backward(batch, WEIGHTS)
    once = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    hot.backward(batch, WEIGHTS)

    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_a_frozen_head_gets_no_gradient_and_changes_no_other() -> None:
    net, batch, embedding, head, maps = toy(0, MASKS)
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
    ("shape", "loss"), [(SHAPE, "cross_entropy"), (SHAPE, "lk_alpha"), (NORM_SHAPE, "tv")]
)
def test_bf16_products_keep_float32_gradients_and_stay_near_the_loss(
    shape: DraftShape, loss: Loss
) -> None:
    net, batch, embedding, head, maps = toy(0, MASKS, shape)
    exact = HotPath(net, embedding, head, maps, loss).backward(batch, WEIGHTS)
    net.zero_grad(set_to_none=True)
    net.float()
    narrow = torch.bfloat16
    head = replace(head, norm_H=head.norm_H.to(narrow), head_VH=head.head_VH.to(narrow))
    batch = replace(batch, aux_N3H=batch.aux_N3H.to(narrow), last_NH=batch.last_NH.to(narrow))
    figures = HotPath(net, embedding.to(narrow), head, maps, loss).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S.double(), exact.nats_S, rtol=0.03, atol=0.0)
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}
