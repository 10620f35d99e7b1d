"""Read safetensors files from their published format alone: a length, a JSON header, raw bytes.

Kept apart from the safetensors library and from our own model, so that what reads a checkpoint in
`eagle3.check` shares no code with what wrote it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle3.errors import CheckpointError

LENGTH_BYTES = 8

# bfloat16 is no numpy type: it is read as the upper half of a float32.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}
FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Entry:
    """One tensor as the header states it: dtype as spelled there, bytes from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightsFile:
    """One safetensors file, mapped into memory.

    Raises:
        CheckpointError: the header is not one, or does not fit the bytes behind it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def raw(self, name: str) -> NDArray[Any]:
        """Read a tensor as stored, without a copy; bfloat16 as its 16 bits (uint16)."""
        entry = self.entries[name]
        flat = self._bytes[entry.begin : entry.end].view(NUMPY_DTYPES[entry.dtype])
        return flat.reshape(entry.shape)

    def floats(self, name: str, rows: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Read rows of a floating tensor, as float32."""
        return to_float32(self.raw(name)[rows], self.entries[name].dtype)

    def non_finite(self, name: str) -> int:
        """Count NaN and infinite values of a tensor; whole numbers have none."""
        stored, dtype = self.raw(name), self.entries[name].dtype
        if dtype == "BF16":
            # All exponent bits set, as IEEE 754 defines; saves a copy twice the size.
            return int(np.count_nonzero((stored & 0x7F80) == 0x7F80))
        return int(stored.size - np.count_nonzero(np.isfinite(stored))) if dtype in FLOATS else 0


def to_float32(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Widen stored values; `dtype` is the header's spelling."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _read_header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        start = LENGTH_BYTES + length
        if start > size:
            raise CheckpointError(
                f"{path} states a header of {length} bytes but has {size} in all; it was cut short "
                "or is no safetensors file: copy it again"
            )
        try:
            header = json.loads(file.read(length))
            entries = {
                name: _entry(stated, start)
                for name, stated in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} has no readable safetensors header ({error!r}); copy the file again"
            ) from error
    _bytes_add_up(path, entries, start, size)
    return entries


def _entry(stated: dict[str, Any], start: int) -> Entry:
    begin, end = stated["data_offsets"]
    return Entry(stated["dtype"], tuple(stated["shape"]), start + begin, start + end)


def _bytes_add_up(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.dtype not in NUMPY_DTYPES:
            raise CheckpointError(
                f"{path}: {name} has dtype {entry.dtype}, which no drafter uses; "
                "write it in bfloat16"
            )
        wanted = math.prod(entry.shape) * NUMPY_DTYPES[entry.dtype].itemsize
        if entry.begin != position or entry.end - entry.begin != wanted:
            raise CheckpointError(
                f"{path}: {name} should lie at byte {position} with {wanted} bytes, the header "
                f"says {entry.begin} to {entry.end}; the file is damaged, copy it again"
            )
        position = entry.end
    if position != size:
        raise CheckpointError(
            f"{path} has {size} bytes, its header describes {position}; copy the file again"
        )
