"""Attention over the keys of step 0, and its gradient: eager, or the best kernel of the GPU.

All return and take the logarithm of the softmax's sum. Given the sum over step 0 *and* the chain,
and the merged output, the gradient formulas of attention over step 0 alone become those of its
part of the whole, so the chain needs no second pass over the keys.

Shapes: N packed rows, padded to the core's own number of rows, A query heads, K key-value heads,
G = A / K, E head width.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from eagle3.attention import Documents
from eagle3.hot.device import bring

CUDNN_ROWS = 1024
"""cuDNN plans each length anew (a tenth of a second), so lengths are padded to multiples."""


class Core(Protocol):
    """Causal attention inside each document: of every packed row, also those that do not draft."""

    @property
    def rows(self) -> int:
        """Rows that inputs must have: N, or more."""
        ...

    def forward(
        self, query_NAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output [N, A, E], and log-sum [A, N] in float32 or wider."""
        ...

    def backward(
        self,
        grad_NAE: Tensor,
        query_NAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_NAE: Tensor,
        log_z_AN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of queries, keys and values, for a whole whose output and log-sum these are."""
        ...


def core_for(documents: Documents, like: Tensor) -> Core:
    """The core for one batch."""
    if not (like.is_cuda and like.dtype in (torch.bfloat16, torch.float16)):
        return EagerCore(documents)
    if len(documents.bounds) == 2:
        return CudnnCore(-(-documents.bounds[-1] // CUDNN_ROWS) * CUDNN_ROWS)
    return FlashCore.of(documents, like.device)


@dataclass(frozen=True)
class EagerCore:
    """Document by document, with whole score matrices."""

    documents: Documents

    @property
    def rows(self) -> int:
        """N."""
        return self.documents.bounds[-1]

    def _spans(self) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(self.documents.bounds)]

    @staticmethod
    def _scores(query_TAE: Tensor, keys_TKE: Tensor) -> Tensor:
        """Masked scores of a document: [K, G, T, T]."""
        length, kv_heads, width = keys_TKE.shape
        query = (query_TAE * width**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = query @ keys_TKE.permute(1, 2, 0)[:, None]
        hidden_TT = scores.new_ones(length, length, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden_TT, float("-inf"))

    def forward(
        self, query_NAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Core`."""
        wide = torch.promote_types(query_NAE.dtype, torch.float32)
        outs, log_zs = [], []
        for here in self._spans():
            scores = self._scores(query_NAE[here], keys_NKE[here]).to(wide)
            log_z = scores.logsumexp(-1)
            weights = (scores - log_z[..., None]).exp().to(values_NKE.dtype)
            out = weights @ values_NKE[here].transpose(0, 1)[:, None]
            outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
            log_zs.append(log_z.flatten(0, 1))
        return torch.cat(outs), torch.cat(log_zs, dim=1)

    def backward(
        self,
        grad_NAE: Tensor,
        query_NAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_NAE: Tensor,
        log_z_AN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Core`."""
        kv_heads, width = keys_NKE.shape[1:]
        delta_AN = (grad_NAE.to(log_z_AN.dtype) * out_NAE).sum(-1).T

        def grouped(x_TAE: Tensor) -> Tensor:
            return x_TAE.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)

        def by_head(x_AT: Tensor) -> Tensor:
            return x_AT.unflatten(0, (kv_heads, -1))[..., None]

        grads = []
        for here in self._spans():
            scores = self._scores(query_NAE[here], keys_NKE[here]).to(log_z_AN.dtype)
            p = (scores - by_head(log_z_AN[:, here])).exp()
            grad, query = grouped(grad_NAE[here]), grouped(query_NAE[here])
            grad_p = (grad @ values_NKE[here].permute(1, 2, 0)[:, None]).to(p.dtype)
            grad_s = p * (grad_p - by_head(delta_AN[:, here])) * width**-0.5
            grad_s, p = grad_s.to(query.dtype), p.to(query.dtype)
            grad_query = grad_s @ keys_NKE[here].transpose(0, 1)[:, None]
            grads.append(
                (
                    grad_query.permute(2, 0, 1, 3).flatten(1, 2),
                    (grad_s.transpose(-1, -2) @ query).sum(1).transpose(0, 1),
                    (p.transpose(-1, -2) @ grad).sum(1).transpose(0, 1),
                )
            )
        queries, keys, values = zip(*grads, strict=True)
        return torch.cat(queries), torch.cat(keys), torch.cat(values)


@dataclass(frozen=True)
class FlashCore:
    """FlashAttention 2 in torch, over all documents at once."""

    bounds: Tensor
    """int32, on the device."""
    rows: int
    longest: int

    @classmethod
    def of(cls, documents: Documents, device: torch.device) -> "FlashCore":
        """For these documents."""
        bounds = torch.tensor(documents.bounds, dtype=torch.int32)
        longest = max(stop - start for start, stop in pairwise(documents.bounds))
        return cls(bring(bounds, device), documents.bounds[-1], longest)

    def forward(
        self, query_NAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Core`."""
        sizes = (self.bounds, self.bounds, self.longest, self.longest)
        out_NAE, log_z_AN, *_ = torch.ops.aten._flash_attention_forward(
            query_NAE, keys_NKE, values_NKE, *sizes, 0.0, True, False
        )
        return out_NAE, log_z_AN

    def backward(
        self,
        grad_NAE: Tensor,
        query_NAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_NAE: Tensor,
        log_z_AN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Core`."""
        sizes = (self.bounds, self.bounds, self.longest, self.longest)
        # Without dropout the kernel reads no random state.
        unused = torch.empty(2, dtype=torch.uint64, device=grad_NAE.device)
        inputs = (grad_NAE, query_NAE, keys_NKE, values_NKE, out_NAE, log_z_AN)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *inputs, *sizes, 0.0, True, unused, unused
        )
        return grads


@dataclass(frozen=True)
class CudnnCore:
    """cuDNN's attention, for one document: on an H200 at 8,192 rows twice FlashAttention 2's speed.

    Rows that fill up the length lie last, so no row before sees them.
    """

    rows: int

    def forward(
        self, query_NAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Core`."""
        batched = (x.transpose(0, 1)[None] for x in (query_NAE, keys_NKE, values_NKE))
        out_1ANE, log_z_1AN1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *batched, None, True, 0.0, True, False
        )
        return out_1ANE[0].transpose(0, 1), log_z_1AN1[0, :, :, 0]

    def backward(
        self,
        grad_NAE: Tensor,
        query_NAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_NAE: Tensor,
        log_z_AN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Core`."""
        batched = (
            x.transpose(0, 1)[None] for x in (grad_NAE, query_NAE, keys_NKE, values_NKE, out_NAE)
        )
        # Without dropout the kernel reads no random state.
        unused = torch.empty((), dtype=torch.int64, device=grad_NAE.device)
        lengths = (None, None, self.rows, self.rows)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *batched, log_z_AN[None, :, :, None], unused, unused, None, *lengths, 0.0, True
        )
        query, keys, values = (grad[0].transpose(0, 1) for grad in grads)
        return query, keys, values
