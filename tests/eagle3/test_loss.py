"""The losses of a drafter's head: their values by definition, their gradients by autograd.

The definitions here are written out over the whole vocabulary, one softmax of everything.
"""

from typing import get_args

import pytest
import torch
from torch import Tensor

from eagle3.config import Loss
from eagle3.loss import ROW_LOSSES, TargetHead, head_loss, predict_target
from eagle3.maps import VocabMaps, full_vocab

H, V, D, U = 6, 17, 7, 40
LOSSES = get_args(Loss)


def toy(drafted: int = D, seed: int = 0) -> tuple[Tensor, Tensor, TargetHead, VocabMaps, Tensor]:
    """Drafter's states [M, H] and head [D, H], the target's head, maps, and its states [U, H]."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    maps = full_vocab(V)
    if drafted < V:
        ids = torch.randperm(V, generator=generator)[:drafted].sort().values
        kept = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        maps = VocabMaps(ids - torch.arange(drafted), kept)
    head = TargetHead(randn(H).abs(), 1e-5, randn(V, H))
    hidden = randn(U, H).requires_grad_()
    weight = randn(drafted, H).requires_grad_()
    return hidden, weight, head, maps, randn(U, H)


def defined(
    loss: Loss, logits_MD: Tensor, head: TargetHead, maps: VocabMaps, last_MH: Tensor
) -> Tensor:
    """The loss of each row, [M], over the whole vocabulary: outside D the drafter says 0."""
    p_MV = head.logits(last_MH).softmax(-1)
    drafted_MD = logits_MD.softmax(-1)
    q_MV = torch.zeros(len(last_MH), V, dtype=torch.float64)
    q_MV = q_MV.index_add(1, maps.ids_D, drafted_MD)
    if loss == "cross_entropy":
        p_MD = p_MV[:, maps.ids_D]
        p_MD = p_MD / p_MD.sum(-1, keepdim=True)
        inside_M = maps.t2d_V[p_MV.argmax(-1)]
        return -(p_MD * drafted_MD.log()).sum(-1) * inside_M
    if loss == "tv":
        return (p_MV - q_MV).abs().sum(-1) / 2
    return -torch.minimum(p_MV, q_MV).sum(-1).log()


@pytest.mark.parametrize("drafted", [D, V])
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradients_are_those_of_the_definition(loss: Loss, drafted: int) -> None:
    hidden, weight, head, maps, last = toy(drafted)
    rows = torch.arange(U).repeat(2)[5:]
    expected = defined(loss, hidden[rows] @ weight.T, head, maps, last[rows]).sum()
    wanted = torch.autograd.grad(expected, (hidden, weight))
    target = predict_target(head, maps, last, loss)
    total, _ = head_loss(hidden[rows], weight, target, rows)
    found = torch.autograd.grad(total, (hidden, weight))

    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["tv", "lk_alpha"])
def test_a_wide_spread_of_logits_leaves_no_gradient_that_a_processor_is_slow_with(
    loss: Loss,
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 50, 400, generator=generator, dtype=torch.float64) * 15
    p, logits = target.softmax(-1), logits.requires_grad_()
    alpha = torch.minimum(p, logits.softmax(-1)).sum(-1)
    expected = 1 - alpha if loss == "tv" else -alpha.log()
    [exact] = torch.autograd.grad(expected.sum(), logits)
    found = logits.detach().float()
    rows = ROW_LOSSES[loss](found, found.max(-1, keepdim=True).values, p.float())

    assert ((exact != 0) & (exact.abs() < torch.finfo(torch.float32).tiny)).any()
    assert not ((found != 0) & (found.abs() < 2.0**-46)).any()
    torch.testing.assert_close(rows.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_toy_has_targets_outside_the_draft_vocabulary_and_they_never_agree(loss: Loss) -> None:
    hidden, weight, head, maps, last = toy()
    target = predict_target(head, maps, last, loss)
    outside = (target.choice_U < 0).nonzero()[:, 0]
    total, hits = head_loss(hidden[outside], weight, target, outside)

    assert 0 < len(outside) < U
    assert int(hits) == 0
    assert (total.item() == 0) == (loss == "cross_entropy")


def test_a_drafter_that_says_what_the_target_says_loses_what_it_cannot_say() -> None:
    hidden, _, head, maps, last = toy()
    p_UV = head.logits(last).softmax(-1)
    mass = p_UV[:, maps.ids_D].sum(-1)
    # A head that reads the target's logits on the draft vocabulary from one-hot states.
    weight, hidden = head.logits(last)[:, maps.ids_D].T.contiguous(), torch.eye(U).double()
    for loss, best in (("tv", 1 - mass), ("lk_alpha", -mass.log())):
        target = predict_target(head, maps, last, loss)
        total, _ = head_loss(hidden, weight, target, torch.arange(U))
        assert total.item() == pytest.approx(best.sum().item(), rel=1e-12)


def test_lk_alpha_of_a_target_that_says_one_token_is_cross_entropy() -> None:
    hidden, weight, head, maps, last = toy(V)
    sharp = TargetHead(head.norm_H, head.eps, head.head_VH * 1e4)
    found = [
        head_loss(hidden, weight, predict_target(sharp, maps, last, loss), torch.arange(U))[0]
        for loss in ("cross_entropy", "lk_alpha")
    ]
    gradients = [torch.autograd.grad(total, weight)[0] for total in found]

    assert found[0].item() == pytest.approx(found[1].item(), rel=1e-12)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", ["tv", "lk_alpha"])
def test_a_drafter_that_is_sure_of_what_the_target_excludes_still_has_a_finite_loss(
    loss: Loss,
) -> None:
    hidden, weight, head, maps, last = toy(V)
    sharp = TargetHead(head.norm_H.float(), head.eps, head.head_VH.float() * 1e4)
    loud = (weight.detach() * -1e4).float().requires_grad_()
    target = predict_target(sharp, maps, last.float(), loss)
    total, _ = head_loss(hidden.detach().float(), loud, target, torch.arange(U))
    (gradient,) = torch.autograd.grad(total, loud)

    assert total.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_that_is_not_trained_gets_no_gradient_and_changes_no_other(loss: Loss) -> None:
    hidden, weight, head, maps, last = toy()
    target = predict_target(head, maps, last, loss)
    rows = torch.arange(U)
    (expected,) = torch.autograd.grad(head_loss(hidden, weight, target, rows)[0], hidden)
    frozen = weight.detach()
    head_loss(hidden, frozen, target, rows)[0].backward()

    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, expected)
    assert frozen.grad is None
