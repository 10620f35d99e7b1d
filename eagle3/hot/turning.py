# mypy: disallow-untyped-defs=False
"""A Triton kernel that turns matrices of one-byte numbers; `float8.turn` is its eager twin.

torch's copy took eleven times as long on an H200, a compiled one 1.6 times (docs/results-train.md).

Shapes: N rows, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 256
"""Of a tile."""


def turn(x_NK: Tensor, out_KN: Tensor) -> None:
    """See `float8.turn`."""
    assert x_NK.itemsize == out_KN.stride(1) == 1
    assert x_NK.is_contiguous()
    rows, columns = x_NK.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _turn[grid](
        x_NK.view(torch.uint8), out_KN.view(torch.uint8), rows, columns, out_KN.stride(0),
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _turn(x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out_ptr + column[:, None] * stride + row[None, :], tile.trans(), mask=inside.trans())
