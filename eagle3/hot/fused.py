"""The pieces between the products: written once, compiled into few kernels on a GPU.

Shapes: N rows, R rows of a step, H width, I width of the MLP, X heads, E head width, C = X * E.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def compiled_on_gpu(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a piece for GPU tensors; the number of rows of each argument may vary.

    Arguments named like `weight_H`, a vector of the width, keep their size.
    """
    code = piece.__code__
    rows = [
        index
        for index, name in enumerate(code.co_varnames[: code.co_argcount])
        if not name.endswith("_H")
    ]

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(piece)

    @functools.wraps(piece)
    def call(*arguments: Any) -> Any:
        if not arguments[0].is_cuda:
            return piece(*arguments)
        for index in rows:
            if isinstance(arguments[index], Tensor):
                torch._dynamo.maybe_mark_dynamic(arguments[index], 0)
        return compiled()(*arguments)

    return call


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@compiled_on_gpu
def plain_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm, reduced in float32 or wider: [N, H]."""
    x = _wide(x_NH)
    scale_N1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_N1 * weight_H).to(x_NH.dtype)


@compiled_on_gpu
def plain_add_norm(
    x_NH: Tensor, y_NH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm."""
    total_NH = x_NH + y_NH
    x = _wide(total_NH)
    scale_N1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return total_NH, (x * scale_N1 * weight_H).to(x_NH.dtype)


@compiled_on_gpu
def swiglu(gate_up_NI: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side: [N, 2I] -> [N, I]."""
    gate, up = _wide(gate_up_NI).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_NI.dtype)


@compiled_on_gpu
def turn_sum(
    x_NC: Tensor, rows_R: Tensor, y_RC: Tensor, cos_R1E: Tensor, sin_R1E: Tensor
) -> Tensor:
    """RoPE of x[rows] + y: [R, C]. Cosines and sines are [R, 1, E / 2]."""
    total = (_wide(x_NC[rows_R]) + y_RC).unflatten(-1, (-1, 2 * cos_R1E.shape[-1]))
    first, second = total.chunk(2, dim=-1)
    turned = torch.cat(
        [first * cos_R1E - second * sin_R1E, second * cos_R1E + first * sin_R1E], dim=-1
    )
    return turned.flatten(1).to(y_RC.dtype)


@compiled_on_gpu
def plain_sum(x_NC: Tensor, rows_R: Tensor, y_RC: Tensor) -> Tensor:
    """x[rows] + y: [R, C]."""
    return (_wide(x_NC[rows_R]) + y_RC).to(y_RC.dtype)


@compiled_on_gpu
def turn_back(out_RC: Tensor, grad_RC: Tensor, cos_R1E: Tensor, sin_R1E: Tensor) -> None:
    """Undo RoPE, into `out`: the gradient of `turn_sum`."""
    grad = _wide(grad_RC).unflatten(-1, (-1, 2 * cos_R1E.shape[-1]))
    first, second = grad.chunk(2, dim=-1)
    turned = torch.cat(
        [first * cos_R1E + second * sin_R1E, second * cos_R1E - first * sin_R1E], dim=-1
    )
    out_RC.copy_(turned.flatten(1))


@compiled_on_gpu
def add_to_rows(total_NC: Tensor, rows_R: Tensor, x_RC: Tensor) -> None:
    """total[rows] += x, for rows that are all different."""
    total_NC.index_put_((rows_R,), total_NC[rows_R] + x_RC)


@compiled_on_gpu
def put_rows(total_NXE: Tensor, rows_R: Tensor, x_RXE: Tensor) -> None:
    """total[rows] = x, for rows that are all different."""
    total_NXE.index_put_((rows_R,), x_RXE)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x_NH: Tensor, rows_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_R)
        ctx.rows = len(x_NH)  # type: ignore[attr-defined]
        return x_NH[rows_R]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_RH: Tensor) -> tuple[Tensor, None]:
        (rows_R,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_NH = grad_RH.new_zeros(ctx.rows, *grad_RH.shape[1:])  # type: ignore[attr-defined]
        put_rows(grad_NH, rows_R, grad_RH)
        return grad_NH, None


def take(x_NH: Tensor, rows_R: Tensor) -> Tensor:
    """x[rows], for rows that ascend and are all different: autograd's own indexing sorts them."""
    if len(rows_R) == len(x_NH):
        return x_NH
    taken: Tensor = _Take.apply(x_NH, rows_R)
    return taken


def arrange(x_NH: Tensor, order_N: Tensor) -> Tensor:
    """x[order], for an order of all rows."""
    arranged: Tensor = _Take.apply(x_NH, order_N)
    return arranged
