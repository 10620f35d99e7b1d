"""Matrix products of the hot path: weights cast once a step, gradients summed in float32.

A stack lays weights that read the same input one below the other, so that they are one product.
The gradient of a weight that is used in every step of the training-time test is not added up step
by step: inputs and output gradients are gathered until a product over them is worth its traffic.

Shapes: N rows, I input width, O output width of a stack.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

GATHERED_ROWS = 8192
"""Rows that make one weight-gradient product. At the width of Kimi-K2.5 a product reads and writes
2.1 GB of float32 gradient beside 1.1 TFLOP for each 2,048 rows."""

EVERY = slice(0, None)

Part = tuple[nn.Parameter, slice]
"""A parameter [o, i], and which of its input columns a stack holds."""


class Stack:
    """Weights [O, I] that share an input, in the dtype of the products."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        self.parts = tuple(parts)
        rows = [parameter.shape[0] for parameter, _ in self.parts]
        first, columns = self.parts[0]
        width = first[:, columns].shape[1]
        self.weight_OI = torch.empty(sum(rows), width, dtype=dtype, device=first.device)
        self._gathered: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the parameters' values: after every optimizer step."""
        sizes = [parameter.shape[0] for parameter, _ in self.parts]
        pieces = self.weight_OI.split(sizes)
        for piece, (parameter, columns) in zip(pieces, self.parts, strict=True):
            piece.copy_(parameter[:, columns])

    def __call__(self, x_NI: Tensor, outputs: slice = EVERY) -> Tensor:
        """x W^T for some of the stack's outputs: [N, O]."""
        low, high, _ = outputs.indices(self.weight_OI.shape[0])
        # The parameter is passed so that autograd visits products whose input needs no gradient.
        result: Tensor = _Product.apply(x_NI, self.parts[0][0], self, low, high)
        return result

    def gather(self, grad_NO: Tensor, x_NI: Tensor, low: int, high: int) -> None:
        """Note a product's output gradient and input; add to the parameters' gradient in time."""
        waiting = self._gathered[low, high]
        waiting.append((grad_NO, x_NI))
        if sum(len(x) for _, x in waiting) >= GATHERED_ROWS:
            self._flush(low, high)

    def flush(self) -> None:
        """Add what is still waiting: after every backward pass."""
        for low, high in list(self._gathered):
            self._flush(low, high)

    @torch.no_grad()
    def _flush(self, low: int, high: int) -> None:
        grads, inputs = zip(*self._gathered.pop((low, high)), strict=True)
        grad_NO = grads[0] if len(grads) == 1 else torch.cat(grads)
        x_NI = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
        start = 0
        for parameter, columns in self.parts:
            stop = start + parameter.shape[0]
            if low <= start and stop <= high and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                add_product(
                    parameter.grad[:, columns], grad_NO[:, start - low : stop - low], x_NI
                )
            start = stop


def add_product(total_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> None:
    """total += grad^T x, summed in the dtype of the total."""
    if total_OI.is_cuda and total_OI.dtype != x_NI.dtype:
        torch.addmm(total_OI, grad_NO.T, x_NI, out_dtype=total_OI.dtype, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.T.to(total_OI.dtype), x_NI.to(total_OI.dtype))


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
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_NO: Tensor) -> tuple[
        Tensor | None, None, None, None, None
    ]:
        (x_NI,) = ctx.saved_tensors  # type: ignore[attr-defined]
        stack, (low, high) = ctx.stack, ctx.span  # type: ignore[attr-defined]
        stack.gather(grad_NO, x_NI, low, high)
        wanted = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        grad_NI = grad_NO @ stack.weight_OI[low:high] if wanted else None
        return grad_NI, None, None, None, None
