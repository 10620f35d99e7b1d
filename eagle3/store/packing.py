"""States as Zarr holds them, and back: bits of bfloat16, float32 as it is, or 8 bits and a scale.

float8 is e4m3fn (4 exponent bits, 3 mantissa bits) with one scale per token and layer. The scale
is a power of two: it moves a state into the format's range and rounds nothing, so all of the error
is the code's, at most half a step (a sixteenth of a value, or 2^-10 of the scale for values below
2^-6 of it), and a code times its scale is a bfloat16 exactly.

Shapes: n tokens, H target width; `...` is [n, 3] for aux and [n] for last.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from eagle3.config import StateDtype

AUX, LAST, SCALE = "aux", "last", "scale"

# A shard that is not there reads as this NaN, and no state is one: zeros would pass for states.
BITS: dict[StateDtype, tuple[type[np.generic], float | int]] = {
    "bfloat16": (np.uint16, 0x7FC0),
    "float32": (np.float32, math.nan),
    "float8": (np.uint8, 0x7F),
}
SCALE_BITS: tuple[type[np.generic], float | int] = (np.float32, math.nan)

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
# Tokens that are scaled at a time: at the width of Kimi-K2.5, 84 MiB beside the shard.
TOKENS_A_PIECE = 1024


def array_names(dtype: StateDtype) -> tuple[str, ...]:
    """Arrays of a store: aux [N, 3, H], last [N, H] and, for float8, scale [N, 4]."""
    return (AUX, LAST, SCALE) if dtype == "float8" else (AUX, LAST)


def pack(dtype: StateDtype, aux_n3H: Tensor, last_nH: Tensor) -> dict[str, np.ndarray]:
    """States as the arrays take them, by array name."""
    if dtype != "float8":
        return {AUX: _bits(aux_n3H), LAST: _bits(last_nH)}
    aux_codes_n3H, aux_scale_n3 = to_float8(aux_n3H)
    last_codes_nH, last_scale_n = to_float8(last_nH)
    scale_n4 = torch.cat([aux_scale_n3, last_scale_n[:, None]], dim=1)
    return {AUX: aux_codes_n3H.numpy(), LAST: last_codes_nH.numpy(), SCALE: scale_n4.numpy()}


def unpack(dtype: StateDtype, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """States from what the arrays gave: aux [n, 3, H] and last [n, H]."""
    aux_n3H, last_nH = torch.from_numpy(arrays[AUX]), torch.from_numpy(arrays[LAST])
    if dtype == "float8":
        scale_n4 = torch.from_numpy(arrays[SCALE])
        return from_float8(aux_n3H, scale_n4[:, :3]), from_float8(last_nH, scale_n4[:, 3])
    if dtype == "bfloat16":
        return aux_n3H.view(torch.bfloat16), last_nH.view(torch.bfloat16)
    return aux_n3H, last_nH


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
    values = codes.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return values.mul_(scale.to(torch.bfloat16)[..., None])


def _bits(states: Tensor) -> np.ndarray:
    return (states.view(torch.uint16) if states.dtype == torch.bfloat16 else states).numpy()
