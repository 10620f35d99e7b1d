"""Matrix products of the hot path: weights cast once a step, gradients summed in float32.

A stack lays weights that read the same input one below the other, so that they are one product.

Shapes: N rows, I input width, O output width of a stack.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

EVERY = slice(0, None)

Part = tuple[Tensor, slice]
"""A parameter [o, i], and which of its input columns a stack holds."""


class Stack:
    """Weights [O, I] that share an input, in the dtype of the products."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        self.parts = tuple(parts)
        rows = [parameter.shape[0] for parameter, _ in self.parts]
        first, columns = self.parts[0]
        width = first[:, columns].shape[1]
        self.weight_OI = torch.empty(sum(rows), width, dtype=dtype, device=first.device)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self.weight_OI.nbytes

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the parameters' values: after every optimizer step."""
        for parameter, _ in self.parts:
            self.take_over(parameter, parameter)

    @torch.no_grad()
    def take_over(self, parameter: Tensor, value_OI: Tensor) -> None:
        """Take over a parameter's value, if it is one of these."""
        sizes = [part.shape[0] for part, _ in self.parts]
        pieces = self.weight_OI.split(sizes)
        for piece, (part, columns) in zip(pieces, self.parts, strict=True):
            if part is parameter:
                piece.copy_(value_OI[:, columns])

    def __call__(self, x_NI: Tensor, outputs: slice = EVERY) -> Tensor:
        """x W^T for some of the stack's outputs: [N, O]."""
        low, high, _ = outputs.indices(self.weight_OI.shape[0])
        # The parameter is passed so that autograd visits products whose input needs no gradient.
        result: Tensor = _Product.apply(x_NI, self.parts[0][0], self, low, high)
        return result

    @torch.no_grad()
    def add_gradient(self, grad_NO: Tensor, x_NI: Tensor, low: int, high: int) -> None:
        """Add grad^T x to the gradients of the parameters that give outputs low to high."""
        start = 0
        for parameter, columns in self.parts:
            stop = start + parameter.shape[0]
            if low <= start and stop <= high and parameter.requires_grad:
                add_gradient(parameter, columns, grad_NO[:, start - low : stop - low], x_NI)
            start = stop


def add_gradient(parameter: Tensor, columns: slice, grad_NO: Tensor, x_NI: Tensor) -> None:
    """Add grad^T x to the gradient of some of a parameter's columns, summed in its own dtype."""
    beta = 1
    if parameter.grad is None:
        # The first product writes instead of adding; only columns that it does not have are zeroed.
        parameter.grad, beta = parameter.new_empty(parameter.shape), 0
        low, high, _ = columns.indices(parameter.shape[1])
        parameter.grad[:, :low].zero_()
        parameter.grad[:, high:].zero_()
    total_OI = parameter.grad[:, columns]
    if total_OI.is_cuda and total_OI.dtype != x_NI.dtype:
        dtype = total_OI.dtype
        torch.addmm(total_OI, grad_NO.T, x_NI, beta=beta, out_dtype=dtype, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.T.to(total_OI.dtype), x_NI.to(total_OI.dtype), beta=beta)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x_NI: Tensor,
        _anchor: Tensor,
        stack: Stack,
        low: int,
        high: int,
    ) -> Tensor:
        ctx.save_for_backward(x_NI)
        ctx.stack, ctx.span = stack, (low, high)  # type: ignore[attr-defined]
        return x_NI @ stack.weight_OI[low:high].T

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_NO: Tensor
    ) -> tuple[Tensor | None, None, None, None, None]:
        (x_NI,) = ctx.saved_tensors  # type: ignore[attr-defined]
        stack, (low, high) = ctx.stack, ctx.span  # type: ignore[attr-defined]
        stack.add_gradient(grad_NO, x_NI, low, high)
        wanted = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        grad_NI = grad_NO @ stack.weight_OI[low:high] if wanted else None
        return grad_NI, None, None, None, None
