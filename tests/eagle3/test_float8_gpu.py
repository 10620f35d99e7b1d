"""The float8 head on a GPU, whose kernels and products are others, against that on a CPU."""

import pytest
import torch

from eagle3.hot.float8 import (
    CODES,
    GRADIENT_CODES,
    UNIT,
    Float8Head,
    quantise,
    require_float8_cores,
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
