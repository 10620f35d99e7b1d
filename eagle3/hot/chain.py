"""Attention of a step of the training-time test: step 0's keys, then the row's own chain.

Steps run backward in the opposite order, each feeding the next, so gradients of keys and values
are summed in place across steps, and handed to autograd by the step that made them: the last to
arrive.

Shapes: N packed rows, R rows of a step, P rows of step 1, S links so far, A query heads, K
key-value heads, G = A / K, E head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.hot.core import Core


class Chains:
    """Keys and values of all steps, and their gradients."""

    def __init__(self, steps: int, rows: int) -> None:
        self.steps, self.rows = steps, rows
        self.first: tuple[Tensor, Tensor] | None = None
        self.grad_first: tuple[Tensor, Tensor] | None = None
        self.links_S2PKE: Tensor | None = None
        self.grad_links_S2PKE: Tensor | None = None

    def add(self, key_RKE: Tensor, value_RKE: Tensor, index: int, place_R: Tensor) -> None:
        """Keep a step's keys and values: all rows of step 0, or a link of the chains."""
        if not index:
            self.first = (key_RKE, value_RKE)
            return
        if self.links_S2PKE is None:
            self.links_S2PKE = key_RKE.new_zeros(self.steps - 1, 2, self.rows, *key_RKE.shape[1:])
        self.links_S2PKE[index - 1, 0][place_R] = key_RKE
        self.links_S2PKE[index - 1, 1][place_R] = value_RKE


@dataclass(frozen=True)
class Where:
    """Which step this is, and where its rows are."""

    index: int
    core: Core
    place_R: Tensor
    """Each row's place among those of step 1 (unused in step 0)."""


def attend(
    query_RAE: Tensor, key_XKE: Tensor, value_XKE: Tensor, chains: Chains, where: Where
) -> Tensor:
    """Attention of a step's rows: [R, A, E].

    Args:
        query_RAE: of the step.
        key_XKE: of the step: of all N rows in step 0, else of the R rows that draft.
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
        chains.add(key_XKE, value_XKE, where.index, where.place_R)
        assert chains.first is not None
        out_RAE, log_z_RA = where.core.forward(query_RAE, *chains.first)
        out_RAE, log_z_RA = out_RAE.contiguous(), log_z_RA.contiguous()
        if where.index:
            assert chains.links_S2PKE is not None
            links = chains.links_S2PKE[: where.index]
            merge_links(query_RAE, links, where.place_R, out_RAE, log_z_RA)
        ctx.save_for_backward(query_RAE, out_RAE, log_z_RA)
        ctx.given = (chains, where)  # type: ignore[attr-defined]
        return out_RAE

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_RAE: Tensor) -> tuple[
        Tensor, Tensor, Tensor, None, None
    ]:
        query_RAE, out_RAE, log_z_RA = ctx.saved_tensors  # type: ignore[attr-defined]
        chains, where = ctx.given  # type: ignore[attr-defined]
        grad_RAE = grad_RAE.contiguous()
        grad_query_RAE, *grad_first = where.core.backward(
            grad_RAE, query_RAE, *chains.first, out_RAE, log_z_RA
        )
        if chains.grad_first is None:
            wide = torch.promote_types(grad_RAE.dtype, torch.float32)
            chains.grad_first = tuple(x.to(wide) for x in grad_first)
        else:
            for total, grad in zip(chains.grad_first, grad_first, strict=True):
                total += grad
        if not where.index:
            key, value = (total.to(grad_RAE.dtype) for total in chains.grad_first)
            return grad_query_RAE, key, value, None, None
        grad_query_RAE = grad_query_RAE.contiguous()
        if chains.grad_links_S2PKE is None:
            chains.grad_links_S2PKE = torch.zeros_like(chains.links_S2PKE)
        add_link_gradients(
            grad_RAE,
            query_RAE,
            chains.links_S2PKE[: where.index],
            where.place_R,
            out_RAE,
            log_z_RA,
            grad_query_RAE,
            chains.grad_links_S2PKE[: where.index],
        )
        key_PKE, value_PKE = chains.grad_links_S2PKE[where.index - 1]
        return grad_query_RAE, key_PKE[where.place_R], value_PKE[where.place_R], None, None


def merge_links(
    query_RAE: Tensor, links_S2PKE: Tensor, place_R: Tensor, out_RAE: Tensor, log_z_RA: Tensor
) -> None:
    """Turn output and log-sum of attention over step 0 into those with the chain, in place."""
    if query_RAE.is_cuda:
        from eagle3.hot import kernels

        kernels.chain_forward(query_RAE, links_S2PKE, place_R, out_RAE, log_z_RA)
        return
    group = query_RAE.shape[1] // links_S2PKE.shape[3]
    out = out_RAE.to(log_z_RA.dtype)
    log_z = log_z_RA.clone()
    for key_PKE, value_PKE in links_S2PKE:
        key_RAE, value_RAE = (
            x[place_R].repeat_interleave(group, dim=1) for x in (key_PKE, value_PKE)
        )
        score_RA = (query_RAE.to(out.dtype) * key_RAE).sum(-1) * query_RAE.shape[-1] ** -0.5
        total = torch.logaddexp(log_z, score_RA)
        out = out * (log_z - total).exp()[..., None]
        out = out + value_RAE * (score_RA - total).exp()[..., None]
        log_z = total
    out_RAE.copy_(out)
    log_z_RA.copy_(log_z)


def add_link_gradients(
    grad_RAE: Tensor,
    query_RAE: Tensor,
    links_S2PKE: Tensor,
    place_R: Tensor,
    out_RAE: Tensor,
    log_z_RA: Tensor,
    grad_query_RAE: Tensor,
    grad_links_S2PKE: Tensor,
) -> None:
    """Add the links' part of the gradient to that of the queries and to their own, in place."""
    if query_RAE.is_cuda:
        from eagle3.hot import kernels

        kernels.chain_backward(
            grad_RAE, query_RAE, links_S2PKE, place_R, out_RAE, log_z_RA,
            grad_query_RAE, grad_links_S2PKE,
        )  # fmt: skip
        return
    kv_heads, scale = links_S2PKE.shape[3], query_RAE.shape[-1] ** -0.5
    group = query_RAE.shape[1] // kv_heads
    grad, query = grad_RAE.to(log_z_RA.dtype), query_RAE.to(log_z_RA.dtype)
    delta_RA = (grad * out_RAE).sum(-1)
    for (key_PKE, value_PKE), grads_2PKE in zip(links_S2PKE, grad_links_S2PKE, strict=True):
        key_RAE, value_RAE = (
            x[place_R].repeat_interleave(group, dim=1) for x in (key_PKE, value_PKE)
        )
        p_RA = ((query * key_RAE).sum(-1) * scale - log_z_RA).exp()
        grad_score_RA = p_RA * ((grad * value_RAE).sum(-1) - delta_RA) * scale
        grad_query_RAE += grad_score_RA[..., None] * key_RAE
        for total, part in zip(
            grads_2PKE, (grad_score_RA[..., None] * query, p_RA[..., None] * grad), strict=True
        ):
            grouped = part.unflatten(1, (kv_heads, group)).sum(2)
            total[place_R] = (total[place_R] + grouped).to(total.dtype)
