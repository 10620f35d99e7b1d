"""Attention of the drafter: over a cache when decoding, over a training step's rows when unrolled.

In the training-time test a row at step i attends to all keys of step 0 up to itself, and to its own
keys of steps 1..i: the chain that it drafted. There is no L x L mask per step, only a diagonal.

Shapes: N rows of step 0 (several documents laid end to end), R rows that still draft, A query
heads, K key-value heads, G = A / K, E head width, T rows of one document.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


def rotate(heads_NXE: Tensor, positions_N: Tensor, theta: float) -> Tensor:
    """Apply RoPE in the half-split convention of Llama; angles in float32 or better.

    Source: RoFormer, arXiv 2104.09864; the pairing (e, e + E/2) is that of Hugging Face's Llama.
    """
    width, device = heads_NXE.shape[-1], heads_NXE.device
    dtype = torch.promote_types(heads_NXE.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    angles_N1E = (positions_N.to(dtype)[:, None] * frequencies).repeat(1, 2)[:, None]
    first, second = heads_NXE.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    rotated = heads_NXE * angles_N1E.cos() + turned * angles_N1E.sin()
    return rotated.to(heads_NXE.dtype)


def attend_cache(query_NAE: Tensor, keys_MKE: Tensor, values_MKE: Tensor) -> Tensor:
    """Causal attention of the last N rows of a sequence over all its M rows: [N, A, E]."""
    rows, length = query_NAE.shape[0], keys_MKE.shape[0]
    visible = torch.ones(rows, length, dtype=torch.bool, device=query_NAE.device)
    visible = visible.tril(diagonal=length - rows)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query_NAE.transpose(0, 1)[None],
        keys_MKE.transpose(0, 1)[None],
        values_MKE.transpose(0, 1)[None],
        attn_mask=visible,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@dataclass(frozen=True)
class Documents:
    """Which packed rows belong together: document d holds rows bounds[d] .. bounds[d + 1]."""

    bounds: tuple[int, ...]

    def positions(self, device: torch.device) -> Tensor:
        """Row number inside its own document, the RoPE position of step 0: [N]."""
        lengths = [stop - start for start, stop in pairwise(self.bounds)]
        return torch.cat([torch.arange(length, device=device) for length in lengths])


@dataclass
class Chain:
    """Keys and values of steps 1..i, one per row that still drafts."""

    keys: list[Tensor]
    """[R, K, E] each."""
    values: list[Tensor]

    def keep(self, kept: Tensor) -> "Chain":
        """The chain of a subset of the rows."""
        return Chain([key[kept] for key in self.keys], [value[kept] for value in self.values])


def attend_chain(
    query_RAE: Tensor,
    keys_NKE: Tensor,
    values_NKE: Tensor,
    chain: Chain,
    rows_R: Tensor,
    documents: Documents,
) -> Tensor:
    """Attention of drafting rows over step 0 and their own chains: [R, A, E].

    Args:
        query_RAE: of row `rows_R[r]` at the current step; rows ascend.
        keys_NKE: of step 0, all rows. A row sees those of its document up to itself.
        values_NKE: likewise.
        chain: of the same rows as the queries, up to and with the current step.
        rows_R: int64, on the CPU or the queries' device.
        documents: their bounds.
    """
    edges = torch.searchsorted(rows_R, torch.tensor(documents.bounds, device=rows_R.device))
    # A step may have no rows left at all.
    parts = [query_RAE[:0]]
    spans = zip(pairwise(edges.tolist()), pairwise(documents.bounds), strict=True)
    for (low, high), (start, stop) in spans:
        if low == high:
            continue
        here = slice(low, high)
        diagonal = Chain([key[here] for key in chain.keys], [value[here] for value in chain.values])
        parts.append(
            _attend_document(
                query_RAE[here],
                keys_NKE[start:stop],
                values_NKE[start:stop],
                diagonal,
                rows_R[here] - start,
            )
        )
    return torch.cat(parts)


def _attend_document(
    query_RAE: Tensor, keys_TKE: Tensor, values_TKE: Tensor, chain: Chain, rows_R: Tensor
) -> Tensor:
    length, kv_heads, width = keys_TKE.shape
    query_KGRE = (query_RAE * width**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    scores_KGRT = query_KGRE @ keys_TKE.permute(1, 2, 0)[:, None]
    hidden_RT = torch.arange(length, device=rows_R.device) > rows_R[:, None]
    scores_KGRT = scores_KGRT.masked_fill(hidden_RT, float("-inf"))
    own = [(query_KGRE * key.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for key in chain.keys]
    scores = torch.cat([scores_KGRT, *own], dim=-1)
    reduction = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=reduction).to(values_TKE.dtype)
    attended = weights[..., :length] @ values_TKE.transpose(0, 1)[:, None]
    for step, value in enumerate(chain.values):
        weight = weights[..., length + step : length + step + 1]
        attended = attended + weight * value.transpose(0, 1)[:, None]
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
