"""The float8 head on a GPU, whose kernels and products are others, against that on a CPU."""

import pytest
import torch

from eagle3.hot.float8 import (
    CODES,
    GRADIENT_CODES,
    UNIT,
    Float8Head,
    WeightGradient,
    quantise,
    require_float8_cores,
    turn,
)

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

C, H, D = 300, 512, 4112


def heads() -> tuple[Float8Head, Float8Head]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(D, H, generator=generator) * 10 ** torch.linspace(-1, 1, H)
    return Float8Head(weight.cuda(), torch.bfloat16), Float8Head(weight, torch.bfloat16)


def test_this_gpu_has_float8_cores() -> None:
    require_float8_cores(torch.device("cuda"))


@pytest.mark.parametrize("name", ["rows_DH", "columns_HD"])
def test_the_float8_head_is_held_as_on_a_cpu(name: str) -> None:
    here, there = (getattr(head, name) for head in heads())
    found, expected = here.cpu().float(), there.float()

    assert here.dtype == CODES
    # Another last bit of a scale can round a number to its neighbour, 2^-3 away: rarely.
    assert (found != expected).float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=0.13, atol=2.0**-9)
    for scale in ("scale_1D", "scale_1H"):
        scales = [getattr(head, scale).cpu() for head in heads()]
        torch.testing.assert_close(*scales, rtol=1e-6, atol=0.0)


def test_float8_products_sum_in_float32_whatever_their_length() -> None:
    head, _ = heads()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(C, H, generator=generator).bfloat16().cuda()
    # One large term and a tail that together weigh as much: 14 bits would lose the tail.
    grad = torch.full((C, D), 1 / D, device="cuda")
    grad[:, 7] -= 1
    unit, weight = (grad * UNIT).to(GRADIENT_CODES), torch.linspace(0, 1e-4, C).cuda()
    found = head.state_gradient(unit, weight)
    columns = head.columns_HD.double() * head.scale_1H.double().T
    expected = (unit.double() / UNIT * weight.double()[:, None]) @ columns.T

    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.double(), expected, rtol=0.01, atol=1e-3 * expected.abs().max()
    )
    weights = head.rows_DH.double() * head.scale_1D.double().T
    codes, scale = quantise(hidden)
    exact = (codes.double() * scale) @ weights.T
    error = (head.logits(hidden).double() - exact).norm() / exact.norm()
    assert error < 0.005


@pytest.mark.parametrize("shape", [(300, 4112), (64, 128), (1, 5)])
def test_the_turning_kernel_turns_into_a_part_of_a_wider_matrix(shape: tuple[int, int]) -> None:
    rows, columns = shape
    codes = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
    out = torch.zeros(columns, rows + 24, dtype=torch.uint8, device="cuda")
    turn(codes, out[:, 8 : 8 + rows])

    assert torch.equal(out[:, 8 : 8 + rows], codes.T)
    assert not out[:, :8].any()
    assert not out[:, 8 + rows :].any()


@pytest.mark.parametrize("wait", [10 * 2**30, 128 * D], ids=["all", "each"])
def test_the_gradient_of_the_weight_is_summed_in_float32_in_place(
    wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.hot.float8.TURNED_AT_ONCE", wait)
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(C, H, generator=generator, device="cuda").bfloat16()
    weight = torch.linspace(0.5, 1, C, device="cuda")
    # Each token is the target of one row, and has a little mass in all others.
    grad = torch.full((C, D), 1 / C, device="cuda")
    grad[torch.arange(D) % C, torch.arange(D)] -= 1
    unit = (grad * UNIT).to(GRADIENT_CODES)
    parameter = torch.empty(D, H, device="cuda", requires_grad=True)
    gradient = WeightGradient(parameter, hidden, weight)
    for start in range(0, C, 128):
        gradient.take(slice(start, start + 128), unit[start : start + 128])
    gradient.add()
    exact = (unit.double() / UNIT).T @ (hidden.double() * weight.double()[:, None])

    assert parameter.grad.dtype == torch.float32
    # e4m3 is off by 2.6% of each state, in the mean of squares.
    assert (parameter.grad.double() - exact).norm() < 0.04 * exact.norm()
