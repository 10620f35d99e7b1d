"""Attention of a step of the training-time test: step 0's keys, then the row's own chain.

Steps run backward in the opposite order, each feeding the next, so gradients of keys and values
are summed in place across steps, and handed to autograd by the step that made them: the last to
arrive.

Shapes: N rows of the core (packed rows, then padding), R rows of a step, P rows of step 1, S links
so far, A query heads, K key-value heads, G = A / K, E head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.hot.core import Core
from eagle3.hot.fused import put_rows


class Chains:
    """Keys and values of all steps, and their gradients."""

    def __init__(self, core: Core, steps: int, rows: int) -> None:
        self.core, self.steps, self.rows = core, steps, rows
        self.first: tuple[Tensor, Tensor] | None = None
        self.grad_first: tuple[Tensor, Tensor] | None = None
        self.links_S2PKE: Tensor | None = None
        self.grad_links_S2PKE: Tensor | None = None

    def add(self, key_RKE: Tensor, value_RKE: Tensor, where: "Where") -> None:
        """Keep a step's keys and values: all rows of step 0, or a link of the chains."""
        if not where.index:
            self.first = (key_RKE, value_RKE)
            if missing := self.core.rows - len(key_RKE):
                key, value = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in self.first)
                self.first = (key, value)
            return
        if self.links_S2PKE is None:
            self.links_S2PKE = key_RKE.new_zeros(self.steps - 1, 2, self.rows, *key_RKE.shape[1:])
        put_rows(self.links_S2PKE[where.index - 1, 0], where.place_R, key_RKE)
        put_rows(self.links_S2PKE[where.index - 1, 1], where.place_R, value_RKE)

    def add_first_gradients(self, grads: tuple[Tensor, Tensor]) -> None:
        """Sum the gradients of step 0's keys and values over steps, in float32."""
        if self.grad_first is None:
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            self.grad_first = (grads[0].to(wide), grads[1].to(wide))
            return
        for total, grad in zip(self.grad_first, grads, strict=True):
            total += grad


@dataclass(frozen=True)
class Where:
    """Which step this is, and where its rows are."""

    index: int
    rows_R: Tensor
    """Packed row numbers."""
    place_R: Tensor
    """Each row's place among those of step 1 (empty in step 0)."""


def attend(
    query_RAE: Tensor, key_XKE: Tensor, value_XKE: Tensor, chains: Chains, where: Where
) -> Tensor:
    """Attention of a step's rows, at their packed places; what lies elsewhere means nothing.

    Returns [N, A, E].

    Args:
        query_RAE: of the step.
        key_XKE: of the step: of all packed rows in step 0, else of the R rows that draft.
        value_XKE: likewise.
        chains: of the steps before; this step is added.
        where: this step.
    """
    attended: Tensor = _Attend.apply(query_RAE, key_XKE, value_XKE, chains, where)
    return attended


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query_RAE: Tensor,
        key_XKE: Tensor,
        value_XKE: Tensor,
        chains: Chains,
        where: Where,
    ) -> Tensor:
        chains.add(key_XKE, value_XKE, where)
        assert chains.first is not None
        query_NAE = _laid_out(query_RAE, chains.core.rows, where.rows_R)
        out_NAE, log_z_AN = chains.core.forward(query_NAE, *chains.first)
        if where.index:
            assert chains.links_S2PKE is not None
            links = chains.links_S2PKE[: where.index]
            merge_links(query_NAE, links, where, out_NAE, log_z_AN)
        ctx.save_for_backward(query_NAE, out_NAE, log_z_AN)
        ctx.given = (chains, where)  # type: ignore[attr-defined]
        ctx.rows = len(key_XKE)  # type: ignore[attr-defined]
        return out_NAE

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_NAE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_NAE, out_NAE, log_z_AN = ctx.saved_tensors  # type: ignore[attr-defined]
        chains, where = ctx.given  # type: ignore[attr-defined]
        grad_query_NAE, *grad_first = chains.core.backward(
            grad_NAE, query_NAE, *chains.first, out_NAE, log_z_AN
        )
        chains.add_first_gradients(grad_first)
        if not where.index:
            key, value = (x[: ctx.rows].to(grad_NAE.dtype) for x in chains.grad_first)  # type: ignore[attr-defined]
            return grad_query_NAE[where.rows_R], key, value, None, None
        if chains.grad_links_S2PKE is None:
            chains.grad_links_S2PKE = torch.zeros_like(chains.links_S2PKE)
        add_link_gradients(
            grad_NAE,
            query_NAE,
            chains.links_S2PKE[: where.index],
            where,
            out_NAE,
            log_z_AN,
            grad_query_NAE,
            chains.grad_links_S2PKE[: where.index],
        )
        key_PKE, value_PKE = chains.grad_links_S2PKE[where.index - 1]
        grads = (grad_query_NAE[where.rows_R], key_PKE[where.place_R], value_PKE[where.place_R])
        return *grads, None, None


def _laid_out(x_RAE: Tensor, rows: int, rows_R: Tensor) -> Tensor:
    """Rows at their packed places, zero elsewhere: [N, A, E]."""
    laid_NAE = x_RAE.new_zeros(rows, *x_RAE.shape[1:])
    put_rows(laid_NAE, rows_R, x_RAE)
    return laid_NAE


def merge_links(
    query_NAE: Tensor, links_S2PKE: Tensor, where: Where, out_NAE: Tensor, log_z_AN: Tensor
) -> None:
    """Turn output and log-sum of attention over step 0 into those with the chain, in place."""
    if query_NAE.is_cuda:
        from eagle3.hot import kernels

        kernels.chain_forward(
            query_NAE, links_S2PKE, where.rows_R, where.place_R, out_NAE, log_z_AN
        )
        return
    group = query_NAE.shape[1] // links_S2PKE.shape[3]
    rows_R, place_R = where.rows_R, where.place_R
    out, log_z, query = out_NAE[rows_R], log_z_AN.T[rows_R], query_NAE[rows_R]
    for key_PKE, value_PKE in links_S2PKE:
        key, value = (x[place_R].repeat_interleave(group, dim=1) for x in (key_PKE, value_PKE))
        score = (query.to(log_z.dtype) * key).sum(-1) * query.shape[-1] ** -0.5
        total = torch.logaddexp(log_z, score)
        out = out * (log_z - total).exp()[..., None] + value * (score - total).exp()[..., None]
        log_z = total
    out_NAE[rows_R] = out.to(out_NAE.dtype)
    log_z_AN[:, rows_R] = log_z.T


def add_link_gradients(
    grad_NAE: Tensor,
    query_NAE: Tensor,
    links_S2PKE: Tensor,
    where: Where,
    out_NAE: Tensor,
    log_z_AN: Tensor,
    grad_query_NAE: Tensor,
    grad_links_S2PKE: Tensor,
) -> None:
    """Add the links' part of the gradient to that of the queries and to their own, in place."""
    rows_R, place_R = where.rows_R, where.place_R
    if query_NAE.is_cuda:
        from eagle3.hot import kernels

        kernels.chain_backward(
            grad_NAE, query_NAE, links_S2PKE, rows_R, place_R, out_NAE, log_z_AN,
            grad_query_NAE, grad_links_S2PKE,
        )  # fmt: skip
        return
    kv_heads, scale = links_S2PKE.shape[3], query_NAE.shape[-1] ** -0.5
    group = query_NAE.shape[1] // kv_heads
    log_z = log_z_AN.T[rows_R]
    grad, query = (x[rows_R].to(log_z.dtype) for x in (grad_NAE, query_NAE))
    delta = (grad * out_NAE[rows_R]).sum(-1)
    for (key_PKE, value_PKE), grads_2PKE in zip(links_S2PKE, grad_links_S2PKE, strict=True):
        key, value = (x[place_R].repeat_interleave(group, dim=1) for x in (key_PKE, value_PKE))
        p = ((query * key).sum(-1) * scale - log_z).exp()
        grad_score = p * ((grad * value).sum(-1) - delta) * scale
        grad_query_NAE[rows_R] += (grad_score[..., None] * key).to(grad_query_NAE.dtype)
        parts = (grad_score[..., None] * query, p[..., None] * grad)
        for total, part in zip(grads_2PKE, parts, strict=True):
            grouped = part.unflatten(1, (kv_heads, group)).sum(2)
            total[place_R] = (total[place_R] + grouped).to(total.dtype)
