"""The head's products in float8 against float64, within what e4m3, e5m2 and bfloat16 can hold."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_batches import toy_batch
from toys import TOY_SHAPE

from eagle3.config import Loss
from eagle3.errors import ParamsError
from eagle3.hot.float8 import (
    GRADIENT_CODES,
    UNIT,
    Float8Head,
    WeightGradient,
    quantise,
    require_float8_cores,
)
from eagle3.hot.head import row_losses
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, TargetPrediction
from eagle3.optimizer import adamw, clip_and_update

E4M3, E5M2, BF16 = 2.0**-4, 2.0**-3, 2.0**-8
"""Largest relative errors of rounding, half of the last bit of a mantissa that starts with one."""
C, H, D = 24, 64, 288
SHAPE = replace(TOY_SHAPE, hidden_size=64, vocab_size=160, draft_vocab=96, intermediate_size=64)
WEIGHTS = [0.8**step for step in range(4)]


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Rows of very different lengths, which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 10 ** torch.linspace(-4, 3, count)[:, None]
    return (torch.randn(count, width, generator=generator) * lengths).bfloat16()


def head_of(seed: int = 1) -> tuple[Tensor, Float8Head]:
    weight = rows(D, H, seed).float() * 10 ** torch.linspace(1, -1, H)
    parameter = weight.requires_grad_()
    return parameter.detach().double(), Float8Head(parameter, torch.bfloat16)


def test_a_row_is_held_to_half_of_e4m3s_last_bit_whatever_its_length() -> None:
    x = rows(C, H)
    codes, scale = quantise(x)
    error = (codes.double() * scale - x.double()).abs()

    # Below e4m3's normal numbers the step is even: 2^-9 of a scale.
    assert (error <= x.double().abs() * E4M3 + scale * 2.0**-10).all()
    assert codes.double().abs().amax(1).tolist() == [448.0] * C


def test_a_row_of_zeros_stays_zero_and_one_that_is_no_number_stays_none() -> None:
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    codes, scale = quantise(x)
    found = codes.float() * scale

    assert found[0].tolist() == [0.0, 0.0]
    assert found[1:].isnan().any(1).all()


def test_logits_are_within_the_formats_errors_of_float64() -> None:
    weight, head = head_of()
    hidden = rows(C, H)
    exact = hidden.double() @ weight.T
    error = (head.logits(hidden).double() - exact).abs()

    # Each factor is off by E4M3 of itself or, if small, by 2^-10 of its row's largest over 448.
    small = 2.0**-10 / 448
    off_h = hidden.double().abs() * E4M3 + hidden.double().abs().amax(1, keepdim=True) * small
    off_w = weight.abs() * E4M3 + weight.abs().amax(1, keepdim=True) * small
    bound = off_h @ weight.T.abs() + hidden.double().abs() @ off_w.T + off_h @ off_w.T
    assert (error <= bound + exact.abs() * 2 * BF16).all()
    # Roundings are independent: 2.6% of each factor, in the mean of squares.
    lengths = hidden.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert (error / lengths).norm() < 0.05 * (exact / lengths).norm()


def test_the_gradient_of_states_is_within_the_formats_errors_of_float64() -> None:
    weight, head = head_of()
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(C, D, generator=generator, dtype=torch.float64).softmax(1)
    grad -= torch.randn(C, D, generator=generator, dtype=torch.float64).softmax(1)
    row_weight = torch.linspace(0, 1e-4, C)
    found = head.state_gradient((grad * UNIT).to(GRADIENT_CODES), row_weight)
    exact = (grad * row_weight[:, None]) @ weight

    off_g = grad.abs() * E5M2
    off_w = weight.abs() * E4M3 + weight.abs().amax(0, keepdim=True) * 2.0**-10 / 448
    bound = off_g @ weight.abs() + grad.abs() @ off_w + off_g @ off_w
    bound = bound * row_weight[:, None] + exact.abs() * 2 * BF16 + 1e-12
    assert ((found.double() - exact).abs() <= bound).all()
    assert found[0].tolist() == [0.0] * H


@pytest.mark.parametrize("wait", [10 * 2**30, 256 * D, 128 * D], ids=["all", "two", "each"])
def test_the_gradient_of_the_weight_is_within_the_formats_errors_of_float64(
    wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.hot.float8.TURNED_AT_ONCE", wait)
    monkeypatch.setattr("eagle3.hot.float8.NUMBERS_AT_ONCE", 128 * H)
    parameter = torch.empty(D, H, requires_grad=True)
    parameter.grad = torch.full((D, H), 3e-6)
    generator = torch.Generator().manual_seed(2)
    # 300 rows: no multiple of 128, so the last product has empty ones.
    hidden = torch.randn(300, H, generator=generator) * 10 ** torch.linspace(-2, 2, H)
    hidden, row_weight = hidden.bfloat16(), torch.linspace(0, 1e-4, 300)
    grad = torch.randn(300, D, generator=generator, dtype=torch.float64).softmax(1)
    grad -= torch.randn(300, D, generator=generator, dtype=torch.float64).softmax(1)
    gradient = WeightGradient(parameter, hidden, row_weight)
    for here in (slice(0, 128), slice(128, 256), slice(256, 384)):
        gradient.take(here, (grad[here] * UNIT).to(GRADIENT_CODES))
    gradient.add()
    gradient.add()  # nothing waits any more

    weighted = hidden.double() * row_weight[:, None].double()
    exact = grad.T @ weighted + 3e-6
    off_g = grad.abs() * E5M2
    # Weighted states are rounded to bfloat16 before, and small ones have even steps.
    highest = weighted.abs().amax(0, keepdim=True)
    off_h = weighted.abs() * (E4M3 + 2 * BF16) + highest * 2.0**-10 / 448
    bound = off_g.T @ weighted.abs() + grad.abs().T @ off_h + off_g.T @ off_h
    assert ((parameter.grad.double() - exact).abs() <= bound + 1e-12).all()


@pytest.mark.parametrize("loss", ["cross_entropy", "tv", "lk_alpha"])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_the_gradient_of_every_loss_fits_into_e5m2_before_it_is_known(
    loss: Loss, spread: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(C, D, generator=generator) * spread
    p = (torch.randn(C, D, generator=generator) * spread).softmax(1).bfloat16()
    prediction = TargetPrediction(p, p.argmax(1), loss)
    given = (prediction, torch.arange(C), torch.ones(C))
    unit = torch.empty(C, D, dtype=GRADIENT_CODES)
    row_losses(logits.clone(), *given, unit)
    row_losses(logits, *given)

    assert unit.float().isfinite().all()
    error = (unit.float() / UNIT - logits).abs()
    # Below e5m2's normal numbers the step is even: 2^-16 of UNIT.
    assert (error <= logits.abs() * E5M2 + 2.0**-17 / UNIT).all()


@pytest.mark.parametrize("peak", [0.0, 15.0, 25.0])
def test_what_becomes_zero_of_a_softmax_over_a_whole_vocabulary_is_next_to_nothing(
    peak: float,
) -> None:
    logits = torch.zeros(1, 163_840)
    logits[0, 7] = peak
    p = torch.zeros(1, 163_840)
    p[0, 11] = 1.0
    prediction = TargetPrediction(p, p.argmax(1), "cross_entropy")
    unit = torch.empty(1, 163_840, dtype=GRADIENT_CODES)
    given = (prediction, torch.tensor([0]), torch.ones(1))
    row_losses(logits.clone(), *given, unit)
    row_losses(logits, *given)
    lost = logits.double().abs()[unit.float() == 0].sum()

    assert lost <= 4e-5 * logits.double().abs().sum()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("loss", ["cross_entropy", "tv", "lk_alpha"])
def test_a_steps_loss_and_gradients_are_near_those_of_float64(loss: Loss, frozen: bool) -> None:
    net, batch, embedding, head, maps = toy_batch(1, ("1" * 40, "0011" * 9), SHAPE)
    with torch.no_grad():
        for parameter in net.parameters():
            # Of a size that keeps states near one, and values that bf16 holds exactly.
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
            parameter.copy_((parameter * 2.5 * scale).bfloat16())
    net.lm_head.weight.requires_grad_(not frozen)
    # Longer rows, so that no row's target is a near-tie with a token outside.
    wide = head.head_VH * 0.1
    wide[maps.ids_D] *= 3
    narrow = [x.bfloat16() for x in (embedding, head.norm_H, wide)]
    batch = replace(batch, aux_N3H=batch.aux_N3H.bfloat16(), last_NH=batch.last_NH.bfloat16())
    exact = [x.double() for x in narrow]
    path = HotPath(net, exact[0], TargetHead(exact[1], head.eps, exact[2]), maps, loss)
    same = replace(batch, last_NH=batch.last_NH.double())
    expected = path.backward(same, WEIGHTS)
    gradients = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)

    net.float()
    given = (narrow[0], TargetHead(narrow[1], head.eps, narrow[2]), maps, loss)
    found = HotPath(net, *given, head_products="float8").backward(batch, WEIGHTS)
    torch.testing.assert_close(found.nats_S.double(), expected.nats_S, rtol=1e-3, atol=0.0)
    for name, parameter in net.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
            continue
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error < (0.1 if loss == "cross_entropy" else 0.2), f"{name}: off by {error:.3f}"


def test_a_trained_head_is_held_anew_after_an_optimizer_step_and_a_frozen_one_is_not() -> None:
    net, _, embedding, head, maps = toy_batch(shape=SHAPE)
    net.float()
    narrow = TargetHead(head.norm_H.bfloat16(), head.eps, head.head_VH.bfloat16())
    hot = HotPath(net, embedding.bfloat16(), narrow, maps, head_products="float8")
    weight = net.lm_head.weight
    before = hot.head.rows_DH.float()
    optimizer = adamw([weight], 0.5, (0.9, 0.95), 0.0)
    weight.grad = torch.randn_like(weight)
    clip_and_update(optimizer, 1.0)

    hot.refresh()
    fresh = Float8Head(weight, torch.bfloat16)
    assert not torch.equal(hot.head.rows_DH.float(), before)
    for name in ("rows_DH", "columns_HD", "scale_1D", "scale_1H"):
        assert torch.equal(getattr(hot.head, name).float(), getattr(fresh, name).float()), name

    weight.requires_grad_(False).mul_(2)
    hot.refresh()
    assert torch.equal(hot.head.scale_1D, fresh.scale_1D)
    # As `train.sharding` fills it: from a value that lies somewhere else.
    hot.take_over(weight, weight)
    assert torch.equal(hot.head.scale_1D, 2 * fresh.scale_1D)


def test_a_large_head_is_written_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = head_of()[1]
    monkeypatch.setattr("eagle3.hot.float8.NUMBERS_AT_ONCE", 130 * H)
    pieces = head_of()[1]

    for name in ("rows_DH", "columns_HD", "scale_1D", "scale_1H"):
        assert torch.equal(getattr(whole, name).float(), getattr(pieces, name).float()), name


def test_a_device_without_float8_cores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "set train.head_products to dtype"
    with pytest.raises(ParamsError, match=rf"trains on a CPU: .* {fix}"):
        require_float8_cores(torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ParamsError, match=rf"A100, of compute capability 8\.0: .* {fix}"):
        require_float8_cores(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    require_float8_cores(torch.device("cuda"))
