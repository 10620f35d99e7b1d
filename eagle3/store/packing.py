"""States as the store holds them, and back: the bytes of each value in planes of their own.

A bfloat16's upper byte (sign and most of the exponent) packs to 0.4 of its size, its lower byte
hardly. In planes of their own each gets a code that fits it, whatever the size of a chunk, and
reading puts them together with one shift.

float8 is e4m3fn (4 exponent bits, 3 mantissa bits) with one scale per token and layer. The scale
is a power of two: it moves a state into the format's range and rounds nothing, so all of the error
is the code's, at most half a step (a sixteenth of a value, or 2^-10 of the scale for values below
2^-6 of it), and a code times its scale is a bfloat16 exactly.

Shapes: n tokens, H target width, P bytes of a value; `...` is [n, 3] for aux and [n] for last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3.config import StateDtype

AUX, LAST, SCALE = "aux", "last", "scale"

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

WIDTHS: dict[StateDtype, int] = {"bfloat16": 2, "float32": 4, "float8": 1}
"""Bytes of a value at rest."""

# A shard that is not there reads as bytes like this one, which in every dtype are no number, and
# no state is one: zeros would pass for states.
MISSING = 0xFF

# What a reader gets.
READ_DTYPES: dict[StateDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8": torch.bfloat16,
}
# What a writer takes: float8 is rounded once, from the target's own precision.
WRITE_DTYPES: dict[StateDtype, torch.dtype] = {**READ_DTYPES, "float8": torch.float32}

# Scaled values stay below 2^8, and round to at most that; the format ends at 448.
TOP_EXPONENT = 8
# Keeps the smallest code times its scale among bfloat16's normal numbers.
LOWEST_EXPONENT = -100
FLOAT32_BIAS, FLOAT32_MANTISSA = 127, 23
# The bits of an e4m3fn, moved to where bfloat16 has sign, exponent and mantissa, are its value
# times 2^-120: the exponents' biases are 7 and 127. torch's own conversion is five times slower.
E4M3_TO_BFLOAT16_SHIFT, E4M3_IN_BFLOAT16, E4M3_TO_BFLOAT16_FACTOR = 4, 0x07F0 - 0x8000, 2.0**120
# Tokens that are scaled at a time: at the width of Kimi-K2.5, 84 MiB beside the shard.
TOKENS_A_PIECE = 1024


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store: uint8 [N, P, *inner] at rest, unsigned numbers [n, *inner] as read."""

    inner: tuple[int, ...]
    width: int
    """P, bytes of a value."""


def array_specs(dtype: StateDtype, hidden_size: int) -> dict[str, ArraySpec]:
    """The arrays of a store: aux, last and, for float8, the float32 scales of the four states."""
    width = WIDTHS[dtype]
    specs = {AUX: ArraySpec((3, hidden_size), width), LAST: ArraySpec((hidden_size,), width)}
    return specs | {SCALE: ArraySpec((4,), 4)} if dtype == "float8" else specs


def pack(dtype: StateDtype, aux_n3H: Tensor, last_nH: Tensor) -> dict[str, np.ndarray]:
    """States as the arrays take them, unsigned numbers [n, *inner], by array name."""
    if dtype != "float8":
        return {AUX: _unsigned(aux_n3H), LAST: _unsigned(last_nH)}
    aux_codes_n3H, aux_scale_n3 = to_float8(aux_n3H)
    last_codes_nH, last_scale_n = to_float8(last_nH)
    scale_n4 = torch.cat([aux_scale_n3, last_scale_n[:, None]], dim=1)
    codes = {AUX: aux_codes_n3H, LAST: last_codes_nH, SCALE: scale_n4}
    return {name: _unsigned(values) for name, values in codes.items()}


def unpack(dtype: StateDtype, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """States, aux [n, 3, H] and last [n, H], of unsigned numbers [n, *inner] by array name."""
    aux_n3H, last_nH = torch.from_numpy(arrays[AUX]), torch.from_numpy(arrays[LAST])
    if dtype == "float8":
        scale_n4 = torch.from_numpy(arrays[SCALE]).view(torch.float32)
        return from_float8(aux_n3H, scale_n4[:, :3]), from_float8(last_nH, scale_n4[:, 3])
    return aux_n3H.view(READ_DTYPES[dtype]), last_nH.view(READ_DTYPES[dtype])


def to_float8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [..., H], and scales, float32 [...], of finite states [..., H]."""
    codes = torch.empty(states.shape, dtype=torch.uint8)
    scale = torch.empty(states.shape[:-1])
    for start in range(0, len(states), TOKENS_A_PIECE):
        piece = slice(start, start + TOKENS_A_PIECE)
        values = states[piece].float()
        _, exponents = torch.frexp(values.abs().amax(dim=-1))
        exponents = (exponents - TOP_EXPONENT).clamp(min=LOWEST_EXPONENT)
        # The bits of 2^exponent, since torch's pow need not be exact.
        scale[piece] = ((exponents + FLOAT32_BIAS) << FLOAT32_MANTISSA).view(torch.float32)
        scaled = values / scale[piece][..., None]
        codes[piece] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scale


def from_float8(codes: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 states [..., H] of codes and scales."""
    # int8 keeps the sign on top while the rest is moved.
    bits = codes.view(torch.int8).to(torch.int16)
    bits <<= E4M3_TO_BFLOAT16_SHIFT
    bits &= E4M3_IN_BFLOAT16
    values = bits.view(torch.bfloat16).mul_(E4M3_TO_BFLOAT16_FACTOR)
    return values.mul_(scale.to(torch.bfloat16)[..., None])


def _unsigned(values: Tensor) -> np.ndarray:
    return values.contiguous().view(UNSIGNED[values.element_size()]).numpy()
