"""RMS norms with a backward pass of their own.

The weight's gradient is a sum over all rows, for which the compiler makes a slow kernel (0.65 ms at
8,192 x 7,168 on an H200, where ours takes 0.1 ms for both gradients).

Shapes: N rows, H width.
"""

import torch
from torch import Tensor

from eagle3.hot.fused import plain_add_norm, plain_norm


def norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm, reduced in float32 or wider: [N, H]."""
    normed: Tensor = _Norm.apply(x_NH, weight_H, eps)
    return normed


def add_norm(x_NH: Tensor, y_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm."""
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x_NH, y_NH, weight_H, eps)
    return both


def norm_backward(
    grad_NH: Tensor, x_NH: Tensor, weight_H: Tensor, eps: float, extra_NH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient of a norm's input, with `extra` added, and of its weight."""
    if x_NH.is_cuda:
        from eagle3.hot import kernels

        return kernels.norm_backward(grad_NH, x_NH, weight_H, eps, extra_NH)
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    x, grad = x_NH.to(wide), grad_NH.to(wide)
    scale_N1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale_N1
    weight_grad_H = (grad * normed).sum(0)
    grad = grad * weight_H
    result = scale_N1 * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    if extra_NH is not None:
        result = result + extra_NH
    return result.to(x_NH.dtype), weight_grad_H


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x_NH: Tensor, weight_H: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x_NH, weight_H)
        ctx.eps = eps  # type: ignore[attr-defined]
        normed: Tensor = plain_norm(x_NH, weight_H, eps)
        return normed

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_NH: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x_NH, weight_H = ctx.saved_tensors  # type: ignore[attr-defined]
        return *norm_backward(grad_NH, x_NH, weight_H, ctx.eps, None), None  # type: ignore[attr-defined]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_NH: Tensor,
        y_NH: Tensor,
        weight_H: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        total_NH, normed_NH = plain_add_norm(x_NH, y_NH, weight_H, eps)
        ctx.save_for_backward(total_NH, weight_H)
        ctx.eps = eps  # type: ignore[attr-defined]
        return total_NH, normed_NH

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total_NH: Tensor, grad_NH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        total_NH, weight_H = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, weight_grad_H = norm_backward(grad_NH, total_NH, weight_H, ctx.eps, grad_total_NH)  # type: ignore[attr-defined]
        return grad, grad, weight_grad_H, None
