"""Attention over the keys of step 0, and its gradient: eager, or FlashAttention on a GPU.

Both return and take the logarithm of the softmax's sum. Given the sum over step 0 *and* the chain,
and the merged output, the gradient formulas of attention over step 0 alone become those of its
part of the whole, so the chain needs no second pass over the keys.

Shapes: N packed rows, R rows of a step, A query heads, K key-value heads, G = A / K, E head width,
Q rows of the layout in which each document's queries are a tail of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from eagle3.attention import Documents


class Core(Protocol):
    """Attention of one step's rows to the keys of step 0 that they see."""

    def forward(
        self, query_RAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output [R, A, E] and log-sum [R, A], float32 or wider."""
        ...

    def backward(
        self,
        grad_RAE: Tensor,
        query_RAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_RAE: Tensor,
        log_z_RA: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of queries, keys and values, for a whole whose output and log-sum these are."""
        ...


def core_for(rows_R: Tensor, documents: Documents, like: Tensor) -> Core:
    """The core for one step's rows (int64, ascending, on the CPU)."""
    if like.is_cuda and like.dtype in (torch.bfloat16, torch.float16):
        return FlashCore.of(rows_R, documents, like.device)
    return EagerCore(rows_R, documents)


@dataclass(frozen=True)
class EagerCore:
    """Document by document, with whole score matrices."""

    rows_R: Tensor
    documents: Documents

    def _spans(self) -> Iterator[tuple[slice, slice]]:
        bounds = torch.tensor(self.documents.bounds)
        edges = torch.searchsorted(self.rows_R, bounds).tolist()
        for (low, high), (start, stop) in zip(
            pairwise(edges), pairwise(self.documents.bounds), strict=True
        ):
            if low < high:
                yield slice(low, high), slice(start, stop)

    def _scores(self, query_RAE: Tensor, keys_NKE: Tensor, here: slice, doc: slice) -> Tensor:
        """Masked scores of a document: [K, G, R, T]."""
        kv_heads, width = keys_NKE.shape[1:]
        query = (query_RAE[here] * width**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = query @ keys_NKE[doc].permute(1, 2, 0)[:, None]
        seen_T = torch.arange(doc.start, doc.stop, device=scores.device)
        hidden_RT = seen_T > self.rows_R[here].to(scores.device)[:, None]
        return scores.masked_fill(hidden_RT, float("-inf"))

    def forward(
        self, query_RAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Core`."""
        wide = torch.promote_types(query_RAE.dtype, torch.float32)
        out_RAE = torch.empty_like(query_RAE)
        log_z_RA = query_RAE.new_empty(query_RAE.shape[:2], dtype=wide)
        for here, doc in self._spans():
            scores = self._scores(query_RAE, keys_NKE, here, doc).to(wide)
            log_z = scores.logsumexp(-1)
            weights = (scores - log_z[..., None]).exp().to(values_NKE.dtype)
            out = weights @ values_NKE[doc].transpose(0, 1)[:, None]
            out_RAE[here] = out.permute(2, 0, 1, 3).flatten(1, 2)
            log_z_RA[here] = log_z.permute(2, 0, 1).flatten(1)
        return out_RAE, log_z_RA

    def backward(
        self,
        grad_RAE: Tensor,
        query_RAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_RAE: Tensor,
        log_z_RA: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Core`."""
        kv_heads, width = keys_NKE.shape[1:]
        grads = tuple(torch.zeros_like(x) for x in (query_RAE, keys_NKE, values_NKE))
        delta_RA = (grad_RAE.to(log_z_RA.dtype) * out_RAE).sum(-1)

        def grouped(x_RAX: Tensor) -> Tensor:
            return x_RAX.unflatten(1, (kv_heads, -1)).movedim(0, 2)

        for here, doc in self._spans():
            scores = self._scores(query_RAE, keys_NKE, here, doc).to(log_z_RA.dtype)
            p = (scores - grouped(log_z_RA[here])[..., None]).exp()
            grad = grouped(grad_RAE[here])
            grad_p = (grad @ values_NKE[doc].permute(1, 2, 0)[:, None]).to(p.dtype)
            grad_s = p * (grad_p - grouped(delta_RA[here])[..., None]) * width**-0.5
            grad_s, p = grad_s.to(query_RAE.dtype), p.to(query_RAE.dtype)
            grad_query = grad_s @ keys_NKE[doc].transpose(0, 1)[:, None]
            grads[0][here] = grad_query.permute(2, 0, 1, 3).flatten(1, 2)
            query = grouped(query_RAE[here])
            grads[1][doc] = (grad_s.transpose(-1, -2) @ query).sum(1).transpose(0, 1)
            grads[2][doc] = (p.transpose(-1, -2) @ grad).sum(1).transpose(0, 1)
        return grads[0], grads[1], grads[2]


@dataclass(frozen=True)
class FlashCore:
    """FlashAttention 2 over all documents at once (torch's own copy, variable lengths, causal).

    It aligns the last query of a document with its last key. So the queries are laid out as the
    document's rows from its first drafting row to its end; rows that do not draft are zero there.
    """

    place_R: Tensor
    starts_of_queries: Tensor
    starts_of_keys: Tensor
    rows: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, rows_R: Tensor, documents: Documents, device: torch.device) -> "FlashCore":
        """The layout for one step's rows."""
        edges = torch.searchsorted(rows_R, torch.tensor(documents.bounds)).tolist()
        starts, places = [0], []
        for (low, high), (start, stop) in zip(
            pairwise(edges), pairwise(documents.bounds), strict=True
        ):
            # One idle query stands for a document without any: the kernel then writes its zeros.
            first = int(rows_R[low]) if low < high else stop - 1
            places.append(rows_R[low:high] - first + starts[-1])
            starts.append(starts[-1] + stop - first)
        lengths = [stop - start for start, stop in pairwise(documents.bounds)]

        def at_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        return cls(
            place_R=torch.cat(places).to(device, non_blocking=True),
            starts_of_queries=at_device(starts),
            starts_of_keys=at_device(list(documents.bounds)),
            rows=starts[-1],
            longest_query=max(stop - start for start, stop in pairwise(starts)),
            longest_key=max(lengths),
        )

    def _laid_out(self, x_RAE: Tensor) -> Tensor:
        laid_QAE = x_RAE.new_zeros(self.rows, *x_RAE.shape[1:])
        laid_QAE[self.place_R] = x_RAE
        return laid_QAE

    def forward(
        self, query_RAE: Tensor, keys_NKE: Tensor, values_NKE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Core`."""
        out_QAE, log_z_AQ, *_ = torch.ops.aten._flash_attention_forward(
            self._laid_out(query_RAE),
            keys_NKE,
            values_NKE,
            self.starts_of_queries,
            self.starts_of_keys,
            self.longest_query,
            self.longest_key,
            0.0,
            True,
            False,
        )
        return out_QAE[self.place_R], log_z_AQ.T[self.place_R]

    def backward(
        self,
        grad_RAE: Tensor,
        query_RAE: Tensor,
        keys_NKE: Tensor,
        values_NKE: Tensor,
        out_RAE: Tensor,
        log_z_RA: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Core`."""
        # Without dropout the kernel reads no random state.
        unused = torch.empty(2, dtype=torch.uint64, device=grad_RAE.device)
        grad_query_QAE, grad_keys_NKE, grad_values_NKE = (
            torch.ops.aten._flash_attention_backward(
                self._laid_out(grad_RAE),
                self._laid_out(query_RAE),
                keys_NKE,
                values_NKE,
                self._laid_out(out_RAE),
                self._laid_out(log_z_RA).T.contiguous(),
                self.starts_of_queries,
                self.starts_of_keys,
                self.longest_query,
                self.longest_key,
                0.0,
                True,
                unused,
                unused,
            )
        )
        return grad_query_QAE[self.place_R], grad_keys_NKE, grad_values_NKE
