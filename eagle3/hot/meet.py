"""Where the two halves of queries, keys and values meet: what the fed token decides, computed once
for all steps of the training-time test, and what the state decides.

Shapes: N packed tokens, R rows of a step, X heads of which the first T turn (RoPE), E head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.hot.fused import add_to_rows, plain_sum, turn_back, turn_sum


@dataclass
class Fed:
    """The embedding half of every token, W_e e side by side for q, k, v, and its gradient."""

    embedded_NC: Tensor
    grad_NC: Tensor | None = None
    pending: int = 0
    """Meetings whose gradient is still to come; the last one hands the sum to autograd."""


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of rows, [R, 1, E / 2]."""

    cos_R1E: Tensor
    sin_R1E: Tensor

    @classmethod
    def of(cls, positions_R: Tensor, width: int, theta: float, dtype: torch.dtype) -> "Angles":
        """RoPE's angles at these positions, computed in float32 or wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, width, 2, device=positions_R.device, dtype=dtype) / width
        angles = (positions_R.to(dtype)[:, None] * theta**-exponents)[:, None]
        return cls(angles.cos(), angles.sin())


@dataclass(frozen=True)
class Part:
    """Queries, keys or values among the columns of `Fed.embedded_NC`."""

    columns: slice
    turns: bool
    """RoPE turns queries and keys."""


def meet(
    fed: Fed, token_R: Tensor, hidden_RC: Tensor, angles: Angles, parts: tuple[Part, ...]
) -> tuple[Tensor, ...]:
    """Each part [R, width] for rows that are fed these tokens and have these hidden halves.

    Args:
        fed: of the batch.
        token_R: packed token numbers, all different.
        hidden_RC: W_h h of the parts, side by side.
        angles: of the rows.
        parts: which of queries, keys and values.
    """
    met: tuple[Tensor, ...] = _Meet.apply(fed.embedded_NC, hidden_RC, fed, token_R, angles, parts)
    return met


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        embedded_NC: Tensor,
        hidden_RC: Tensor,
        fed: Fed,
        token_R: Tensor,
        angles: Angles,
        parts: tuple[Part, ...],
    ) -> tuple[Tensor, ...]:
        fed.pending += 1
        ctx.given = (fed, token_R, angles, parts)  # type: ignore[attr-defined]
        cos, sin = angles.cos_R1E, angles.sin_R1E
        pieces = hidden_RC.split([p.columns.stop - p.columns.start for p in parts], dim=1)
        return tuple(
            turn_sum(embedded_NC[:, part.columns], token_R, piece, cos, sin)
            if part.turns
            else plain_sum(embedded_NC[:, part.columns], token_R, piece)
            for part, piece in zip(parts, pieces, strict=True)
        )

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor, None, None, None, None]:
        fed, token_R, angles, parts = ctx.given  # type: ignore[attr-defined]
        widths = [part.columns.stop - part.columns.start for part in parts]
        back_RC = grads[0].new_empty(len(token_R), sum(widths))
        for part, piece, grad in zip(parts, back_RC.split(widths, dim=1), grads, strict=True):
            if part.turns:
                turn_back(piece, grad, angles.cos_R1E, angles.sin_R1E)
            else:
                piece.copy_(grad)
        if fed.grad_NC is None:
            fed.grad_NC = torch.zeros_like(fed.embedded_NC)
        columns = slice(parts[0].columns.start, parts[-1].columns.stop)
        add_to_rows(fed.grad_NC[:, columns], token_R, back_RC)
        fed.pending -= 1
        return fed.grad_NC if not fed.pending else None, back_RC, None, None, None, None
