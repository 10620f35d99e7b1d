"""Ranges of one array of a store: Zarr's sharded layout, read without Zarr's machinery.

A shard is its chunks, each a zstd frame that carries its checksum, and behind them an index: offset
and length of each chunk, and the crc32c of these. Zarr reads the same bytes to the same values
(tests/eagle3/store/test_shards.py), on one core at a quarter of the speed, and slower still where
rows are short (docs/decisions/0005-layout-of-the-store.md).

Shapes: n tokens of a range, P bytes of a value, C chunks of a shard.
Source: Zarr v3, the codec sharding_indexed.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd

from eagle3.store.packing import MISSING, ArraySpec
from eagle3.store.seals import damaged

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
CRC_BYTES = 4
NOT_WRITTEN = 2**64 - 1
assert sys.byteorder == "little", "the store's planes are put together lowest byte first"

# Reading needs none of its options.
FRAME = Zstd()


class ShardedArray:
    """One array; threads may share it."""

    def __init__(self, folder: Path, spec: ArraySpec, chunk_tokens: int, shard_tokens: int) -> None:
        self.folder, self.spec = folder, spec
        self.chunk_tokens, self.shard_tokens = chunk_tokens, shard_tokens
        self._indices: dict[int, np.ndarray] = {}
        self._own = threading.local()

    def empty(self, tokens: int) -> np.ndarray:
        """Room for a range: unsigned numbers [n, *inner]."""
        return np.empty((tokens, *self.spec.inner), UNSIGNED[self.spec.width])

    def pieces(self, start: int, stop: int, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Work that fills `out` with tokens [start, stop), chunk by chunk, in any order."""
        for chunk in range(start // self.chunk_tokens, -(-stop // self.chunk_tokens)):
            first = chunk * self.chunk_tokens
            here = slice(max(start, first) - first, min(stop, first + self.chunk_tokens) - first)
            there = out[here.start + first - start : here.stop + first - start]
            yield lambda chunk=chunk, here=here, there=there: self._fill(chunk, here, there)

    def _fill(self, chunk: int, here: slice, there: np.ndarray) -> None:
        """Put tokens `here` of a chunk together.

        Raises:
            StoreError: the shard is missing, cut short, or its checksums do not hold.
        """
        shard, place = divmod(chunk, self.shard_tokens // self.chunk_tokens)
        path = self.folder / f"c.{shard}{'.0' * (1 + len(self.spec.inner))}"
        try:
            with path.open("rb", buffering=0) as file:
                if shard not in self._indices:
                    self._indices[shard] = self._index(file.fileno())
                planes = [
                    self._plane(file.fileno(), offset, length, room)[here]
                    for (offset, length), room in zip(
                        self._indices[shard][place].tolist(), self._room(), strict=True
                    )
                ]
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        except (RuntimeError, ValueError) as error:
            raise damaged(path, str(error)) from error
        if self.spec.width == 1:
            there[...] = planes[0]
            return
        higher = planes[-1]
        for plane in reversed(planes[:-1]):
            np.left_shift(higher, there.dtype.type(8), out=there)
            np.bitwise_or(there, plane, out=there)
            higher = there

    def _index(self, file: int) -> np.ndarray:
        """Offset and length of every plane of every chunk: uint64 [C, P, 2]."""
        chunks = self.shard_tokens // self.chunk_tokens
        size = chunks * self.spec.width * 16
        start = max(0, os.fstat(file).st_size - size - CRC_BYTES)
        content = os.pread(file, size + CRC_BYTES, start)
        if len(content) != size + CRC_BYTES:
            raise ValueError(f"it is too short for its index of {size} bytes")
        if google_crc32c.value(content[:size]) != int.from_bytes(content[size:], "little"):
            raise ValueError("the checksum of its index does not hold")
        return np.frombuffer(content[:size], "<u8").reshape(chunks, self.spec.width, 2)

    def _plane(self, file: int, offset: int, length: int, room: np.ndarray) -> np.ndarray:
        """One byte of every value of a chunk, in `room`: uint8 [chunk_tokens, *inner]."""
        if offset == NOT_WRITTEN:
            # As Zarr does with a plane that would hold nothing else.
            room.fill(MISSING)
            return room
        packed = self._packed(length)
        if os.preadv(file, [packed], offset) != length:
            raise ValueError(f"it ends before byte {offset + length}")
        FRAME.decode(packed, out=room)
        return room

    def _packed(self, length: int) -> memoryview:
        """This thread's room for the bytes of one plane as they are in the file."""
        if length > len(getattr(self._own, "packed", b"")):
            self._own.packed = bytearray(length)
        return memoryview(self._own.packed)[:length]

    def _room(self) -> np.ndarray:
        """This thread's room for the planes of one chunk: fresh memory costs more than decoding."""
        if not hasattr(self._own, "planes"):
            shape = (self.spec.width, self.chunk_tokens, *self.spec.inner)
            self._own.planes = np.empty(shape, np.uint8)
        return self._own.planes
