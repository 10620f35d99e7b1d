"""Layouts of hidden states on disk that the store is compared with, each behind one interface.

Shapes: n tokens of a range, H target width.
"""

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from store_states import States
from torch import Tensor

from eagle3.config import StateDtype
from eagle3.store.layout import Header
from eagle3.store.rows import rows_sha256
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter

BLOCK = 16 << 20
Pair = tuple[Tensor, Tensor]


class Layout:
    """One way to lay states on disk, in a folder of its own."""

    name: str

    def __init__(self, folder: Path, states: States) -> None:
        self.folder, self.states = folder, states
        self.offsets = np.cumsum([0, *states.lengths]).tolist()

    def write(self) -> None:
        """Write all rows; what is not durable then is made so by the caller."""
        raise NotImplementedError

    def open(self) -> None:
        """Whatever a reader does once; nothing, for most."""
        return

    def look_at(self, row: int) -> Pair:
        """One row, which may be mapped: its bytes are read when they are used."""
        raise NotImplementedError

    def read_row(self, row: int) -> Pair:
        """One row, its bytes read within the timed call."""
        aux_n3H, last_nH = self.look_at(row)
        return aux_n3H.clone(), last_nH.clone()

    def read_batch(self, rows: Sequence[int], pool: Executor) -> Pair:
        """Rows laid end to end, as the trainer wants them: each put into its place by a thread."""
        lengths, width = [self.states.lengths[row] for row in rows], self.states.width
        aux_n3H = torch.empty(sum(lengths), 3, width, dtype=torch.bfloat16)
        last_nH = torch.empty(sum(lengths), width, dtype=torch.bfloat16)

        def put(row: int, aux_place: Tensor, last_place: Tensor) -> None:
            aux, last = self.look_at(row)
            aux_place.copy_(aux)
            last_place.copy_(last)

        for _ in pool.map(put, rows, aux_n3H.split(lengths), last_nH.split(lengths)):
            pass
        return aux_n3H, last_nH

    def read_all(self) -> int:
        """Read from the first token to the last; the decoded bytes."""
        return sum(decoded(self.read_row(row)) for row in range(len(self.states.lengths)))

    def row(self, row: int) -> Pair:
        """The states of a row, from where they come."""
        return self.states.take(self.offsets[row], self.offsets[row + 1])

    def make_durable(self) -> None:
        """Sync every file."""
        for file in self.files():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())

    def forget(self) -> None:
        """Take every file out of the page cache."""
        for file in self.files():
            with file.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def files(self) -> list[Path]:
        """All of them."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    @property
    def bytes(self) -> int:
        """On disk."""
        return sum(path.stat().st_size for path in self.files())

    def remove(self) -> None:
        """Give the disk back."""
        shutil.rmtree(self.folder)


class Ours(Layout):
    """eagle3's store."""

    def __init__(
        self, folder: Path, states: States, dtype: StateDtype, chunk: int, shard: int
    ) -> None:
        super().__init__(folder, states)
        self.name = f"eagle3 {dtype}, chunks of {chunk}"
        self.rows = states.rows()
        self.header = Header(
            target=states.name,
            target_fingerprint="",
            rows_sha256=rows_sha256(self.rows),
            tokens=states.tokens,
            rows=len(states.lengths),
            hidden_size=states.width,
            aux_layers=(0, 1, 2),
            last="benchmark",
            dtype=dtype,
            engine="benchmark",
            chunk_tokens=chunk,
            shard_tokens=shard,
        )

    def write(self) -> None:
        """Shard by shard, with markers, checksums and a sync each."""
        writer = StateWriter(self.folder / "states.zarr", self.header, self.rows)
        for shard in range(self.header.num_shards):
            span = self.header.span(shard)
            writer.write(shard, *self.states.take(span.start, span.stop))

    def open(self) -> None:
        """Header and markers."""
        self.store = StateStore.open(self.folder / "states.zarr")

    def read_row(self, row: int) -> Pair:
        """By the offsets."""
        return self.store.read(self.offsets[row], self.offsets[row + 1])

    def read_batch(self, rows: Sequence[int], pool: Executor) -> Pair:  # noqa: ARG002
        """By the store's own threads, as many as the pool has."""
        return self.store.read_spans([self.rows.span(row) for row in rows])

    def read_all(self) -> int:
        """In ranges of about 64 MiB that end with chunks."""
        chunk_bytes = self.header.chunk_tokens * self.states.bytes_per_token
        step = self.header.chunk_tokens * max(1, (64 << 20) // chunk_bytes)
        total = self.header.tokens
        return sum(
            decoded(self.store.read(start, min(start + step, total)))
            for start in range(0, total, step)
        )


class SafetensorsRows(Layout):
    """One safetensors file per row."""

    name = "one safetensors file per row"

    def write(self) -> None:
        """Row by row."""
        self.folder.mkdir()
        for row in range(len(self.states.lengths)):
            aux_n3H, last_nH = self.row(row)
            tensors = {"aux": aux_n3H.contiguous(), "last": last_nH.contiguous()}
            save_file(tensors, self.folder / f"{row}.safetensors")

    def look_at(self, row: int) -> Pair:
        """Its file, mapped."""
        tensors = load_file(self.folder / f"{row}.safetensors")
        return tensors["aux"], tensors["last"]


class TorchRows(Layout):
    """One file of torch.save per row."""

    name = "one torch file per row"

    def write(self) -> None:
        """Row by row."""
        self.folder.mkdir()
        for row in range(len(self.states.lengths)):
            aux_n3H, last_nH = self.row(row)
            tensors = {"aux": aux_n3H.clone(), "last": last_nH.clone()}
            torch.save(tensors, self.folder / f"{row}.ckpt")

    def look_at(self, row: int) -> Pair:
        """Its file."""
        tensors = torch.load(self.folder / f"{row}.ckpt", weights_only=True)
        return tensors["aux"], tensors["last"]

    def read_row(self, row: int) -> Pair:
        """It is read already."""
        return self.look_at(row)


class Npy(Layout):
    """Two `.npy` files of all rows, the bits of bfloat16 as uint16, mapped."""

    name = "two .npy files, mapped"

    def write(self) -> None:
        """In pieces of 1,024 tokens."""
        self.folder.mkdir()
        tokens, width = self.states.tokens, self.states.width
        shapes = {"aux": (tokens, 3, width), "last": (tokens, width)}
        maps = [
            np.lib.format.open_memmap(
                self.folder / f"{name}.npy", mode="w+", dtype=np.uint16, shape=shape
            )
            for name, shape in shapes.items()
        ]
        for start in range(0, tokens, 1024):
            stop = min(start + 1024, tokens)
            for array, states in zip(maps, self.states.take(start, stop), strict=True):
                array[start:stop] = states.contiguous().view(torch.uint16).numpy()

    def open(self) -> None:
        """Map both; privately, since torch wants what could be written to."""
        self.arrays = [
            np.load(self.folder / f"{name}.npy", mmap_mode="c") for name in ("aux", "last")
        ]

    def look_at(self, row: int) -> Pair:
        """Its range, mapped."""
        span = slice(self.offsets[row], self.offsets[row + 1])
        aux_n3H, last_nH = (torch.from_numpy(array[span]) for array in self.arrays)
        return aux_n3H.view(torch.bfloat16), last_nH.view(torch.bfloat16)


class Plain(Layout):
    """The states' bytes in one file, read in large blocks: what the disk gives."""

    name = "plain read of one file"

    def write(self) -> None:
        """In pieces of 1,024 tokens."""
        self.folder.mkdir()
        with (self.folder / "states").open("wb") as file:
            for start in range(0, self.states.tokens, 1024):
                for part in self.states.take(start, min(start + 1024, self.states.tokens)):
                    file.write(part.contiguous().view(torch.uint16).numpy().data)

    def read_all(self) -> int:
        """Into one buffer, again and again."""
        buffer, total = bytearray(BLOCK), 0
        with (self.folder / "states").open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
        return total


def decoded(pair: Pair) -> int:
    """Bytes of two tensors."""
    return sum(part.numel() * part.element_size() for part in pair)
