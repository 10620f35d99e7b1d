"""Each Triton kernel against its eager twin: on a GPU, or anywhere with TRITON_INTERPRET=1."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from eagle3.hot import chain, head, kernels, norms
from eagle3.hot.chain import Where
from eagle3.hot.float8 import GRADIENT_CODES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, R, P, S = 11, 5, 7, 3


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 6), (9, 3, 64), (8, 8, 128)])
def test_chain_kernels_merge_and_differentiate_like_the_eager_loop(
    heads: int, kv_heads: int, width: int
) -> None:
    torch.manual_seed(0)
    query, out, grad, grad_query = (torch.randn(N, heads, width) for _ in range(4))
    links, grad_links = (torch.randn(S, 2, P, kv_heads, width) for _ in range(2))
    log_z = torch.randn(heads, N)
    where = Where(2, torch.randperm(N)[:R].sort().values, torch.randperm(P)[:R])
    rows, place = where.rows_R.to(DEVICE), where.place_R.to(DEVICE)
    on = [x.to(DEVICE, copy=True) for x in (query, links, out, log_z, grad, grad_query, grad_links)]
    kernels.chain_forward(on[0], on[1][:2], rows, place, on[2], on[3])
    kernels.chain_backward(on[4], on[0], on[1][:2], rows, place, on[2], on[3], on[5], on[6][:2])
    chain.merge_links(query, links[:2], where, out, log_z)
    chain.add_link_gradients(grad, query, links[:2], where, out, log_z, grad_query, grad_links[:2])

    for found, expected in zip(on[2:], (out, log_z, grad, grad_query, grad_links), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [11, 5000])
def test_the_cross_entropy_kernel_takes_the_first_of_equal_logits(columns: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, columns) * 3
    logits[0, 3] = logits[0, 7] = 20.0
    p, predictor, weight = (
        torch.randn(4, columns).softmax(-1),
        torch.randint(4, (6,)),
        torch.rand(6),
    )
    choice = torch.randint(columns, (4,))
    choice[predictor[0]] = 3
    mass = p.sum(-1)
    given = [x.to(DEVICE, copy=True) for x in (logits, p, mass, choice, predictor, weight)]
    nats, hits = kernels.cross_entropy(*given)
    expected_nats, expected_hits = head.cross_entropy(logits, p, mass, choice, predictor, weight)

    torch.testing.assert_close(nats.cpu(), expected_nats, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given[0].cpu(), logits, rtol=1e-4, atol=1e-6)
    assert hits.tolist() == expected_hits.tolist()
    assert hits[0]


@pytest.mark.parametrize("columns", [16, 5000])
def test_the_cross_entropy_kernel_writes_the_unweighted_gradient_in_float8(columns: int) -> None:
    torch.manual_seed(0)
    logits, p = torch.randn(6, columns) * 5, (torch.randn(4, columns) * 5).softmax(-1)
    rest = (p, p.sum(-1), p.argmax(-1), torch.randint(4, (6,)), torch.rand(6))
    unit = torch.empty(6, columns, dtype=GRADIENT_CODES)
    on, unit_on = [x.to(DEVICE, copy=True) for x in (logits, *rest)], unit.to(DEVICE)
    untouched = on[0].clone()
    nats, _ = kernels.cross_entropy(*on, unit_on)
    expected_nats, _ = head.cross_entropy(logits, *rest, unit)

    torch.testing.assert_close(nats.cpu(), expected_nats, rtol=1e-5, atol=1e-5)
    assert torch.equal(on[0], untouched)
    # Another last bit in float32 can round to the neighbour in e5m2: rarely, and one step away.
    found, expected = unit_on.cpu().float(), unit.float()
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=0.25, atol=2.0**-16)


@pytest.mark.parametrize("extra", [True, False])
def test_the_norm_kernel_differentiates_like_the_formula(
    extra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "NORM_PROGRAMS", 4)
    torch.manual_seed(0)
    grad, x, more, weight = (
        torch.randn(10, 24),
        torch.randn(10, 24),
        torch.randn(10, 24),
        torch.randn(24),
    )
    added = more if extra else None
    on = [None if y is None else y.to(DEVICE, copy=True) for y in (grad, x, weight, added)]
    found = kernels.norm_backward(on[0], on[1], on[2], 1e-5, on[3])
    expected = norms.norm_backward(grad, x, weight, 1e-5, added)

    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=1e-5)
