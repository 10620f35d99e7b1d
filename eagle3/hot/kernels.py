# mypy: disallow-untyped-defs=False
"""Triton kernels of the hot path. Each has an eager twin with which the tests compare it.

Shapes: N rows, R rows of a step, S links of the chain, A query heads, K key-value heads, E head
width, M rows to score, D draft vocabulary, U predicting positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.hot.float8 import UNIT

HEADS_AT_ONCE = 16
COLUMNS_AT_ONCE = 4096
NORM_PROGRAMS = 264
"""Each sums the weight gradient of its rows: two a multiprocessor of an H200."""


def chain_forward(
    query_NAE: Tensor,
    links_S2PKE: Tensor,
    rows_R: Tensor,
    place_R: Tensor,
    out_NAE: Tensor,
    log_z_AN: Tensor,
) -> None:
    """Merge the links into attention over step 0, in place: see `chain.merge_links`."""
    assert all(x.is_contiguous() for x in (query_NAE, out_NAE, log_z_AN))
    grid, sizes = _chain_grid(len(rows_R), query_NAE, links_S2PKE)
    _chain_forward[grid](
        query_NAE, links_S2PKE, rows_R, place_R, out_NAE, log_z_AN, log_z_AN.shape[1],
        links_S2PKE.shape[0], *links_S2PKE.stride()[:3], query_NAE.shape[-1] ** -0.5, **sizes,
    )  # fmt: skip


def chain_backward(
    grad_NAE: Tensor,
    query_NAE: Tensor,
    links_S2PKE: Tensor,
    rows_R: Tensor,
    place_R: Tensor,
    out_NAE: Tensor,
    log_z_AN: Tensor,
    grad_query_NAE: Tensor,
    grad_links_S2PKE: Tensor,
) -> None:
    """Add the links' part of the gradient, in place: see `chain.add_link_gradients`."""
    assert all(x.is_contiguous() for x in (grad_NAE, query_NAE, out_NAE, log_z_AN, grad_query_NAE))
    grid, sizes = _chain_grid(len(rows_R), query_NAE, links_S2PKE)
    _chain_backward[grid](
        grad_NAE, query_NAE, links_S2PKE, rows_R, place_R, out_NAE, log_z_AN, log_z_AN.shape[1],
        grad_query_NAE, grad_links_S2PKE, links_S2PKE.shape[0], *links_S2PKE.stride()[:3],
        query_NAE.shape[-1] ** -0.5, **sizes,
    )  # fmt: skip


def norm_backward(
    grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, eps: float, extra_NH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `norms.norm_backward`."""
    rows, width = x_NH.shape
    grad_NH, x_NH = grad_NH.contiguous(), x_NH.contiguous()
    extra_NH = None if extra_NH is None else extra_NH.contiguous()
    result_NH = torch.empty_like(x_NH)
    partial_PH = torch.empty(NORM_PROGRAMS, width, dtype=torch.float32, device=x_NH.device)
    _norm_backward[(NORM_PROGRAMS,)](
        grad_NH, x_NH, weight_H, extra_NH, result_NH, partial_PH, rows, eps,
        EXTRA=extra_NH is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=16,
    )  # fmt: skip
    return result_NH, partial_PH.sum(0)


def cross_entropy(
    logits_MD: Tensor,
    p_UD: Tensor,
    mass_U: Tensor,
    choice_U: Tensor,
    predictor_M: Tensor,
    weight_M: Tensor,
    unit_MD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `head.cross_entropy`."""
    assert unit_MD is None or unit_MD.is_contiguous()
    rows, columns = logits_MD.shape
    nats_M = torch.empty(rows, dtype=torch.float32, device=logits_MD.device)
    hits_M = torch.empty(rows, dtype=torch.bool, device=logits_MD.device)
    _cross_entropy[(rows,)](
        logits_MD, p_UD, mass_U, choice_U, predictor_M, weight_M, nats_M, hits_M, unit_MD,
        columns, UNIT, WITH_UNIT=unit_MD is not None, BLOCK=COLUMNS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return nats_M, hits_M


def _chain_grid(
    rows: int, query_NAE: Tensor, links_S2PKE: Tensor
) -> tuple[tuple[int, int], dict[str, int]]:
    heads, width = query_NAE.shape[1:]
    kv_heads = links_S2PKE.shape[3]
    group = heads // kv_heads
    group_block = triton.next_power_of_2(group)
    block = max(1, min(HEADS_AT_ONCE // group_block, triton.next_power_of_2(kv_heads)))
    sizes = {
        "KV": kv_heads,
        "GROUP": group,
        "WIDTH": width,
        "BLOCK_K": block,
        "BLOCK_G": group_block,
        "BLOCK_E": triton.next_power_of_2(width),
    }
    return (rows, triton.cdiv(kv_heads, block)), sizes


@triton.jit
def _places(
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Offsets and masks of this program's heads: in a query row, a key row and a row of sums."""
    kv = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    member = tl.arange(0, BLOCK_G)
    part = tl.arange(0, BLOCK_E)
    head = kv[:, None] * GROUP + member[None, :]
    head_ok = (kv[:, None] < KV) & (member[None, :] < GROUP)
    query = head[:, :, None] * WIDTH + part[None, None, :]
    query_ok = head_ok[:, :, None] & (part[None, None, :] < WIDTH)
    key = kv[:, None] * WIDTH + part[None, :]
    key_ok = (kv[:, None] < KV) & (part[None, :] < WIDTH)
    return head, head_ok, query, query_ok, key, key_ok


@triton.jit
def _chain_forward(
    query_ptr, links_ptr, rows_ptr, place_ptr, out_ptr, log_z_ptr, log_z_stride,
    links, link_stride, value_stride, row_stride, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, head_ok, at, at_ok, key_at, key_ok = _places(KV, GROUP, WIDTH, BLOCK_K, BLOCK_G, BLOCK_E)
    laid = tl.load(rows_ptr + row)
    row_at = laid * KV * GROUP * WIDTH
    log_z_at = log_z_ptr + head * log_z_stride + laid
    query = tl.load(query_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    log_z = tl.load(log_z_at, mask=head_ok, other=0.0)
    # 64 bits wide, as the row number it is made from: all links together may pass 2**31 numbers.
    step = tl.load(place_ptr + row) * row_stride
    for _ in range(links):
        key = tl.load(links_ptr + step + key_at, mask=key_ok, other=0.0).to(tl.float32)
        value_at = step + value_stride + key_at
        value = tl.load(links_ptr + value_at, mask=key_ok, other=0.0).to(tl.float32)
        score = tl.sum(query * key[:, None, :], axis=2) * scale
        top = tl.maximum(log_z, score)
        total = top + tl.log(tl.exp(log_z - top) + tl.exp(score - top))
        old = tl.exp(log_z - total)
        new = tl.exp(score - total)
        out = out * old[:, :, None] + value[:, None, :] * new[:, :, None]
        log_z = total
        step += link_stride
    tl.store(out_ptr + row_at + at, out.to(out_ptr.dtype.element_ty), mask=at_ok)
    tl.store(log_z_at, log_z, mask=head_ok)


@triton.jit
def _chain_backward(
    grad_ptr, query_ptr, links_ptr, rows_ptr, place_ptr, out_ptr, log_z_ptr, log_z_stride,
    grad_query_ptr, grad_links_ptr, links, link_stride, value_stride, row_stride, scale,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, head_ok, at, at_ok, key_at, key_ok = _places(KV, GROUP, WIDTH, BLOCK_K, BLOCK_G, BLOCK_E)
    laid = tl.load(rows_ptr + row)
    row_at = laid * KV * GROUP * WIDTH
    log_z_at = log_z_ptr + head * log_z_stride + laid
    query = tl.load(query_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    log_z = tl.load(log_z_at, mask=head_ok, other=0.0)
    delta = tl.sum(grad * out, axis=2)
    grad_query = tl.load(grad_query_ptr + row_at + at, mask=at_ok, other=0.0).to(tl.float32)
    step = tl.load(place_ptr + row) * row_stride
    for _ in range(links):
        key = tl.load(links_ptr + step + key_at, mask=key_ok, other=0.0).to(tl.float32)
        value_at = step + value_stride + key_at
        value = tl.load(links_ptr + value_at, mask=key_ok, other=0.0).to(tl.float32)
        score = tl.sum(query * key[:, None, :], axis=2) * scale
        p = tl.exp(score - log_z)
        grad_score = p * (tl.sum(grad * value[:, None, :], axis=2) - delta) * scale
        grad_query += grad_score[:, :, None] * key[:, None, :]
        grad_key_ptr = grad_links_ptr + step + key_at
        grad_key = tl.load(grad_key_ptr, mask=key_ok, other=0.0).to(tl.float32)
        grad_key += tl.sum(grad_score[:, :, None] * query, axis=1)
        tl.store(grad_key_ptr, grad_key.to(grad_links_ptr.dtype.element_ty), mask=key_ok)
        grad_value_ptr = grad_links_ptr + value_at
        grad_value = tl.load(grad_value_ptr, mask=key_ok, other=0.0).to(tl.float32)
        grad_value += tl.sum(p[:, :, None] * grad, axis=1)
        tl.store(grad_value_ptr, grad_value.to(grad_links_ptr.dtype.element_ty), mask=key_ok)
        step += link_stride
    grad_query = grad_query.to(grad_query_ptr.dtype.element_ty)
    tl.store(grad_query_ptr + row_at + at, grad_query, mask=at_ok)


@triton.jit
def _cross_entropy(
    logits_ptr, p_ptr, mass_ptr, choice_ptr, predictor_ptr, weight_ptr, nats_ptr, hits_ptr,
    unit_ptr, columns, unit, WITH_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    predictor = tl.load(predictor_ptr + row)
    weight = tl.load(weight_ptr + row)
    p_mass = tl.load(mass_ptr + predictor)
    logits_row = logits_ptr + row * columns
    p_row = p_ptr + predictor * columns
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = column < columns
        logit = tl.load(logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, logit)
        # A lane that has seen no column yet has mass 0 at -inf, and -inf - -inf is no number.
        kept = tl.where(top > float("-inf"), mass * tl.exp(top - higher), 0.0)
        mass = kept + tl.where(inside, tl.exp(logit - higher), 0.0)
        top = higher
    peak = tl.max(top, axis=0)
    total = tl.sum(tl.where(top > float("-inf"), mass * tl.exp(top - peak), 0.0), axis=0)
    log_z = peak + tl.log(total)
    best = tl.full((BLOCK,), columns, tl.int32)
    nats = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = column < columns
        logit = tl.load(logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.load(p_row + column, mask=inside, other=0.0).to(tl.float32)
        # Of equal logits the first counts, as torch's argmax has it on a CPU.
        best = tl.minimum(best, tl.where(logit == peak, column, columns))
        nats += tl.where(inside, p * (log_z - logit), 0.0)
        grad = tl.exp(logit - log_z) * p_mass - p
        if WITH_UNIT:
            narrow = (grad * unit).to(unit_ptr.dtype.element_ty)
            tl.store(unit_ptr + row * columns + column, narrow, mask=inside)
        else:
            grad = (grad * weight).to(logits_ptr.dtype.element_ty)
            tl.store(logits_row + column, grad, mask=inside)
    tl.store(hits_ptr + row, tl.min(best, axis=0) == tl.load(choice_ptr + predictor))
    tl.store(nats_ptr + row, tl.sum(nats, axis=0))


@triton.jit
def _norm_backward(
    grad_ptr, x_ptr, weight_ptr, extra_ptr, result_ptr, partial_ptr, rows, eps,
    EXTRA: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros((BLOCK,), tl.float32)
    at = first * WIDTH + column
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
        normed = x * scale
        weight_grad += grad * normed
        grad = grad * weight
        result = scale * (grad - normed * (tl.sum(grad * normed, axis=0) / WIDTH))
        if EXTRA:
            result += tl.load(extra_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(result_ptr + at, result.to(result_ptr.dtype.element_ty), mask=inside)
        at += tl.num_programs(0) * WIDTH
    tl.store(partial_ptr + first * WIDTH + column, weight_grad, mask=inside)
