"""The head's products in float8, on tensor cores that multiply it twice as fast as bfloat16.

The cores sum what lies side by side in memory. Two products read the head, which is held twice, by
row and by column, in e4m3. A scale for each of its rows and columns, and for each row of states,
makes the largest entry e4m3's largest. The third, the gradient of the head's own weight, sums over
rows: gradients of logits and states are turned for it.

What the loss gives for each logit is held in e5m2, times UNIT: |softmax * mass - p| is at most
mass, about one, and so are the gradients of tv and lk_alpha (alpha is at least the sum that they
divide by it). So the scale is known before the pass that makes them, and the row's weight goes into
it. e5m2 reaches 2^-32 below UNIT: of a softmax over 163,840 logits that is flat (2^-17 each)
nothing is lost, and entries that become zero have at most 163,840 * 2^-32 = 4e-5 of the row's sum.

Sums are promoted to float32 every 128 numbers (no `use_fast_accum`): the tensor cores' own 14 bits
would swallow the tail of 163,840 small terms, and shrink every logit a little.

Shapes: M rows to score, C rows of a chunk of them, N rows, K numbers side by side, H width, D draft
vocabulary.
"""

import torch
from torch import Tensor

from eagle3.errors import ParamsError
from eagle3.hot.fused import compiled_on_gpu
from eagle3.hot.products import EVERY, Part

CODES, GRADIENT_CODES = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = torch.finfo(CODES).max
UNIT = 2.0**15
"""e5m2's largest is 1.75 times as much: room for a mass a little above one."""
NUMBERS_AT_ONCE = 2**27
"""Of the head while it or its gradient is written: 512 MiB in float32."""
TURNED_AT_ONCE = 10 * 2**30
"""Bytes of turned gradients. Few products: each adds a whole head of float32 to memory traffic."""
ROWS_TOGETHER = 128
"""Turned rows start at multiples of it; of 16 would do, and the product take 1.7 times as long."""


def require_float8_cores(device: torch.device) -> None:
    """Refuse a device that has no float8 tensor cores.

    Raises:
        ParamsError: it is a CPU, or a GPU before compute capability 8.9 (Ada, Hopper and later).
    """
    name = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):
            return
        name = f"{torch.cuda.get_device_name(device)}, of compute capability {capability[0]}."
        name += f"{capability[1]}"
    raise ParamsError(
        f"train.head_products is float8, but the drafter trains on {name}: float8 products need a "
        "GPU of compute capability 8.9 or higher; set train.head_products to dtype"
    )


class Float8Head:
    """The draft head's weight [D, H], for both of its products."""

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Results of the products are in `dtype`."""
        self.parts: tuple[Part, ...] = ((parameter, EVERY),)
        self.dtype, device = dtype, parameter.device
        rows, width = parameter.shape
        self.rows_DH = torch.empty(rows, width, dtype=CODES, device=device)
        self.columns_HD = torch.empty(width, rows, dtype=CODES, device=device)
        self.scale_1D = torch.empty(1, rows, device=device)
        self.scale_1H = torch.empty(1, width, device=device)
        self.take_over(parameter, parameter)

    @property
    def nbytes(self) -> int:
        """Of both copies and their scales."""
        held = (self.rows_DH, self.columns_HD, self.scale_1D, self.scale_1H)
        return sum(tensor.nbytes for tensor in held)

    def refresh(self) -> None:
        """As `Stack.refresh`; a frozen head is as it was."""
        ((parameter, _),) = self.parts
        if parameter.requires_grad:
            self.take_over(parameter, parameter)

    @torch.no_grad()
    def take_over(self, parameter: Tensor, value_DH: Tensor) -> None:
        """As `Stack.take_over`."""
        if parameter is not self.parts[0][0]:
            return
        highest_H = torch.zeros_like(self.scale_1H[0])
        pieces = _slices(value_DH)
        for here in pieces:
            self.rows_DH[here], scale_N1 = quantise(value_DH[here])
            self.scale_1D[0, here] = scale_N1[:, 0]
            highest_H = torch.maximum(highest_H, _highest(value_DH[here]))
        self.scale_1H[0] = _scale(highest_H)
        for here in pieces:
            turn(_codes(value_DH[here], self.scale_1H[0]), self.columns_HD[:, here])

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Of states: [C, D]."""
        codes_CH, scale_C1 = quantise(hidden_CH)
        return _product(codes_CH, self.rows_DH, scale_C1, self.scale_1D, self.dtype)

    def state_gradient(self, unit_CD: Tensor, weight_C: Tensor) -> Tensor:
        """Of weighted losses by the states: [C, H].

        Args:
            unit_CD: gradient of the unweighted losses by the logits, times UNIT, in e5m2.
            weight_C: of each row, float32 or wider.
        """
        scale_C1 = (weight_C / UNIT).float()[:, None]
        return _product(unit_CD, self.columns_HD, scale_C1, self.scale_1H, self.dtype)


class WeightGradient:
    """The gradient of a trained head's weight, of chunks of rows as they are scored.

    Their gradients of logits wait, turned, until there are enough for a product.
    """

    def __init__(self, parameter: Tensor, hidden_MH: Tensor, weight_M: Tensor) -> None:
        """Of rows with these states, whose losses have these weights in the sum."""
        self.parameter, self.hidden_MH, self.weight_M = parameter, hidden_MH, weight_M
        self.waiting = slice(0, 0)
        columns = parameter.shape[0]
        most = TURNED_AT_ONCE // columns // ROWS_TOGETHER * ROWS_TOGETHER
        room = min(_whole(len(hidden_MH)), most)
        self.unit_DM = torch.empty(columns, room, dtype=GRADIENT_CODES, device=parameter.device)

    def take(self, here: slice, unit_CD: Tensor) -> None:
        """The next rows' gradients, as `Float8Head.state_gradient` has them."""
        if here.start + len(unit_CD) - self.waiting.start > self.unit_DM.shape[1]:
            self.add()
        place = here.start - self.waiting.start
        turn(unit_CD, self.unit_DM[:, place : place + len(unit_CD)])
        self.waiting = slice(self.waiting.start, here.start + len(unit_CD))

    def add(self) -> None:
        """Add what waits to the parameter's gradient, in its own dtype."""
        rows = self.waiting.stop - self.waiting.start
        if not rows:
            return
        unit_DM = self.unit_DM[:, : _whole(rows)]
        unit_DM[:, rows:].zero_()
        hidden_MH = self.hidden_MH.new_zeros(_whole(rows), self.hidden_MH.shape[1])
        weight_M1 = self.weight_M[self.waiting, None]
        torch.mul(self.hidden_MH[self.waiting], weight_M1, out=hidden_MH[:rows])
        scale_H = _scale(_highest(hidden_MH))
        hidden_HM = hidden_MH.new_empty(hidden_MH.shape[::-1], dtype=CODES)
        turn(_codes(hidden_MH, scale_H), hidden_HM)
        grad_DH, first = self.parameter.grad, self.parameter.grad is None
        if grad_DH is None:
            grad_DH = self.parameter.grad = self.parameter.new_empty(self.parameter.shape)
        for here in _slices(grad_DH):
            unit = unit_DM[here]
            scale_N1 = scale_H.new_full((len(unit), 1), 1 / UNIT)
            given = (unit, hidden_HM, scale_N1, scale_H[None], torch.float32)
            if first:
                _product(*given, grad_DH[here])
            else:
                grad_DH[here] += _product(*given)
        self.waiting = slice(self.waiting.stop, self.waiting.stop)


@compiled_on_gpu
def quantise(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [N, K], and the scale of each row, float32 [N, 1]: x is about codes * scale."""
    x = x_NK.float()
    scale_N1 = _scale(x.abs().amax(-1, keepdim=True))
    return (x / scale_N1).to(CODES), scale_N1


@compiled_on_gpu
def _highest(x_NH: Tensor) -> Tensor:
    """The largest absolute value of each column: [H]."""
    return x_NH.abs().amax(0)


@compiled_on_gpu
def _codes(x_NH: Tensor, scale_H: Tensor) -> Tensor:
    """e4m3 codes of columns with these scales: [N, H]."""
    return (x_NH.float() / scale_H).to(CODES)


def turn(x_NK: Tensor, out_KN: Tensor) -> None:
    """Write rows of one-byte numbers as columns of `out`."""
    if x_NK.is_cuda:
        from eagle3.hot import turning

        turning.turn(x_NK, out_KN)
    else:
        out_KN.copy_(x_NK.T)


def _scale(highest: Tensor) -> Tensor:
    # Of nothing but zeros the scale does not matter, as long as it can divide.
    return highest.float().clamp(min=torch.finfo(torch.float32).tiny * LARGEST) / LARGEST


def _product(
    x_NK: Tensor,
    y_OK: Tensor,
    scale_N1: Tensor,
    scale_1O: Tensor,
    dtype: torch.dtype,
    out_NO: Tensor | None = None,
) -> Tensor:
    """(x * scale) (y * scale)^T: [N, O]."""
    # Private in torch, which has no other product of float8 with scales.
    return torch._scaled_mm(x_NK, y_OK.T, scale_N1, scale_1O, out_dtype=dtype, out=out_NO)


def _slices(value_DH: Tensor) -> list[slice]:
    rows, width = value_DH.shape
    size = max(1, NUMBERS_AT_ONCE // width // ROWS_TOGETHER) * ROWS_TOGETHER
    return [slice(start, start + size) for start in range(0, rows, size)]


def _whole(rows: int) -> int:
    return -(-rows // ROWS_TOGETHER) * ROWS_TOGETHER
