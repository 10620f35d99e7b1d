"""Shards of one array of a store: Zarr's sharded layout, without Zarr's machinery.

A shard is its chunks, each a zstd frame that carries its checksum, and behind them an index: offset
and length of each chunk, and the crc32c of these. Zarr reads the same bytes to the same values
(tests/eagle3/store/test_shards.py), but read and wrote them at about a third of the speed
(docs/decisions/0005-layout-of-the-store.md). Wherever a shard lies (eagle3.store.place), a run of
chunks is one read of it, since all their planes lie side by side.

Shapes: n tokens of a range, P bytes of a value, C chunks of a shard.
Source: Zarr v3, the codec sharding_indexed.
"""

import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise

import google_crc32c
import numpy as np

from eagle3.store.frames import frame_of, read_frame
from eagle3.store.packing import MISSING, ArraySpec
from eagle3.store.place import Place
from eagle3.store.seals import Seal, damaged

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
CRC_BYTES = 4
# Chunks of a row that are read and put together in one go, at least one: calls cost as much as the
# decoding of a few tokens, and two threads shall share what a short row has.
RUN_BYTES = 512 * 2**10
NOT_WRITTEN = 2**64 - 1
assert sys.byteorder == "little", "the store's planes are put together lowest byte first"


class ShardedArray:
    """One array; threads may share it."""

    def __init__(
        self, place: Place, name: str, spec: ArraySpec, chunk_tokens: int, shard_tokens: int
    ) -> None:
        self._place, self.name, self.spec = place, name, spec
        self.chunk_tokens, self.shard_tokens = chunk_tokens, shard_tokens
        self._chunks = shard_tokens // chunk_tokens
        chunk_bytes = chunk_tokens * spec.width * math.prod(spec.inner)
        self._run = max(1, RUN_BYTES // chunk_bytes)
        self._indices: dict[int, np.ndarray] = {}
        self._own = threading.local()

    def empty(self, tokens: int) -> np.ndarray:
        """Room for a range: unsigned numbers [n, *inner]."""
        return np.empty((tokens, *self.spec.inner), UNSIGNED[self.spec.width])

    def write(self, shard: int, values: np.ndarray, pool: Executor) -> Seal:
        """Write a whole shard, unsigned numbers [n, *inner], durably.

        Equal values give equal bytes, however many threads the pool has.
        """
        chunks, width = self._chunks, self.spec.width
        written = -(-len(values) // self.chunk_tokens)
        places = [(chunk, plane) for chunk in range(written) for plane in range(width)]
        index = np.full((chunks, width, 2), NOT_WRITTEN, "<u8")
        size, digest = 0, hashlib.sha256()
        with self._place.create(self.file(shard)) as file:
            frames = pool.map(lambda place: self._frame(values, *place), places)
            for place, frame in zip(places, frames, strict=True):
                index[place] = size, len(frame)
                size += file.write(frame)
                digest.update(frame)
            content = index.tobytes()
            tail = content + google_crc32c.value(content).to_bytes(CRC_BYTES, "little")
            size += file.write(tail)
            digest.update(tail)
        return Seal(bytes=size, sha256=digest.hexdigest())

    def file(self, shard: int) -> str:
        """Name of a shard's file within the store."""
        return f"{self.name}/c.{shard}{'.0' * (1 + len(self.spec.inner))}"

    def _frame(self, values: np.ndarray, chunk: int, plane: int) -> bytes:
        """One plane of one chunk, packed; the last chunk is filled up to its size."""
        piece = values[chunk * self.chunk_tokens : (chunk + 1) * self.chunk_tokens]
        bytes_of = piece.view(np.uint8).reshape(*piece.shape, self.spec.width)[..., plane]
        full = np.full((self.chunk_tokens, *self.spec.inner), MISSING, np.uint8)
        full[: len(piece)] = bytes_of
        return frame_of(full)

    def pieces(self, start: int, stop: int, out: np.ndarray) -> Iterator[Callable[[], None]]:
        """Work that fills `out` with tokens [start, stop), some chunks each, in any order."""
        chunk, end = start // self.chunk_tokens, -(-stop // self.chunk_tokens)
        while chunk < end:
            left_of_shard = self._chunks - chunk % self._chunks
            chunks = range(chunk, min(end, chunk + min(self._run, left_of_shard)))
            first, behind = chunk * self.chunk_tokens, chunks.stop * self.chunk_tokens
            here = slice(max(start, first) - first, min(stop, behind) - first)
            there = out[here.start + first - start : here.stop + first - start]
            yield partial(self._fill, chunks, here, there)
            chunk = chunks.stop

    def _fill(self, chunks: range, here: slice, there: np.ndarray) -> None:
        """Put tokens `here` of a run of chunks of one shard together.

        Raises:
            StoreError: the shard is missing, cut short, or its checksums do not hold.
        """
        shard, place = divmod(chunks.start, self._chunks)
        file = self.file(shard)
        try:
            if shard not in self._indices:
                self._indices[shard] = self._index(file)
            index = self._indices[shard][place : place + len(chunks)]
            planes = self._planes(file, index.reshape(-1, 2).tolist())
        except FileNotFoundError as error:
            raise damaged(self._place.file(file), "it is missing") from error
        except (RuntimeError, ValueError) as error:
            raise damaged(self._place.file(file), str(error)) from error
        if self.spec.width == 1:
            there[...] = planes[0, here]
            return
        higher = planes[-1, here]
        for plane in planes[-2::-1]:
            np.left_shift(higher, there.dtype.type(8), out=there)
            np.bitwise_or(there, plane[here], out=there)
            higher = there

    def _index(self, file: str) -> np.ndarray:
        """Offset and length of every plane of every chunk: uint64 [C, P, 2]."""
        size = self._chunks * self.spec.width * 16
        content = self._place.tail(file, size + CRC_BYTES)
        if len(content) != size + CRC_BYTES:
            raise ValueError(f"it is too short for its index of {size} bytes")
        if google_crc32c.value(content[:size]) != int.from_bytes(content[size:], "little"):
            raise ValueError("the checksum of its index does not hold")
        return np.frombuffer(content[:size], "<u8").reshape(self._chunks, self.spec.width, 2)

    def _planes(self, file: str, frames: list[list[int]]) -> np.ndarray:
        """Each byte of every value of a run of chunks, of its frames by offset and length.

        uint8 [P, tokens, *inner], in this thread's room.
        """
        tokens, planes = self.chunk_tokens, self._room()
        # Frame by frame: the chunks one behind the other, each plane by plane.
        rooms = [
            plane[start : start + tokens]
            for start in range(0, len(frames) // self.spec.width * tokens, tokens)
            for plane in planes
        ]
        if frames[0][0] != NOT_WRITTEN and all(a + n == b for (a, n), (b, _) in pairwise(frames)):
            # As we write them.
            packed = self._packed(sum(length for _, length in frames))
            self._place.read_into(file, frames[0][0], packed)
            at = 0
            for (_, length), room in zip(frames, rooms, strict=True):
                read_frame(packed[at : at + length], room)
                at += length
            return planes
        for (offset, length), room in zip(frames, rooms, strict=True):
            if offset == NOT_WRITTEN:
                # As Zarr does with a plane that would hold nothing else.
                room.fill(MISSING)
                continue
            packed = self._packed(length)
            self._place.read_into(file, offset, packed)
            read_frame(packed, room)
        return planes

    def _packed(self, length: int) -> memoryview:
        """This thread's room for the bytes of planes as they are in the file."""
        if length > len(getattr(self._own, "packed", b"")):
            self._own.packed = bytearray(length)
        return memoryview(self._own.packed)[:length]

    def _room(self) -> np.ndarray:
        """This thread's room for the planes of a run: fresh memory costs more than decoding."""
        if not hasattr(self._own, "planes"):
            shape = (self.spec.width, self._run * self.chunk_tokens, *self.spec.inner)
            self._own.planes = np.empty(shape, np.uint8)
        return self._own.planes
