"""Writing a store of hidden states so that a kill at any instant loses no finished shard.

A shard is written whole, in one go: its data, made durable; then its marker. What has no marker is
not there, and is removed by whoever goes on. One process starts a store; others may then write to
it, too, each shard by one of them.

Shapes: n tokens of one shard, H target width.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from eagle3.errors import StoreError
from eagle3.store.layout import (
    ROWS,
    SHARDS,
    Header,
    create_arrays,
    is_done,
    marker_path,
    open_arrays,
    read_header,
    seal_static_files,
    token_ids_sha256,
)
from eagle3.store.packing import WRITE_DTYPES, pack
from eagle3.store.rows import Rows, load_rows, save_rows
from eagle3.store.seals import Marker
from eagle3.work import fsync_folder


class StateWriter:
    """A store that grows shard by shard, in any order."""

    def __init__(self, path: Path, header: Header, rows: Rows, alone: bool = True) -> None:
        """Start a store at `path`, or go on with the one that is there.

        `alone`: nobody else writes to it now, so what is unfinished is nobody's, and is removed.

        Raises:
            StoreError: what is there was made from something else, or is damaged.
        """
        self.path, self.header, self.rows = path, header, rows
        if path.exists():
            self._require_same(read_header(path))
        else:
            self._create()
        self._arrays = open_arrays(path, header)
        if alone:
            self.remove_leftovers()
        # Compression leaves Python to the others: a core for each plane of a chunk.
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="write-states")

    @classmethod
    def join(cls, path: Path) -> "StateWriter":
        """Write to a store that another process started, beside others.

        Raises:
            StoreError: there is no store.
        """
        return cls(path, read_header(path), load_rows(path / ROWS), alone=False)

    @property
    def done(self) -> set[int]:
        """Shards that are finished."""
        return {shard for shard in range(self.header.num_shards) if is_done(self.path, shard)}

    def write(self, shard: int, aux_n3H: Tensor, last_nH: Tensor) -> None:
        """Write all tokens of a shard, in the dtype of `buffers`, and mark it as finished."""
        span, files = self.header.span(shard), {}
        for name, values in pack(self.header.dtype, aux_n3H, last_nH).items():
            assert len(values) == span.stop - span.start, "a shard is written whole"
            array = self._arrays[name]
            files[f"{name}/{array.file(shard).name}"] = array.write(shard, values, self._pool)
        marker = Marker(
            start=span.start,
            stop=span.stop,
            token_ids_sha256=token_ids_sha256(self.rows.tokens_N[span]),
            files=files,
        )
        marker.save(marker_path(self.path, shard))
        fsync_folder(self.path / SHARDS)

    def buffers(self, shard: int) -> tuple[Tensor, Tensor]:
        """Room for the states of a shard: aux [n, 3, H] and last [n, H], to be filled."""
        span, width = self.header.span(shard), self.header.hidden_size
        count, dtype = span.stop - span.start, WRITE_DTYPES[self.header.dtype]
        return torch.empty(count, 3, width, dtype=dtype), torch.empty(count, width, dtype=dtype)

    def _create(self) -> None:
        """Make the empty store beside its place, so that in its place it is whole."""
        new = self.path.with_name(f".{self.path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        create_arrays(new, self.header)
        save_rows(self.rows, new / ROWS)
        seal_static_files(new)
        (new / SHARDS).mkdir()
        for path in sorted(new.rglob("*")):
            fsync_folder(path) if path.is_dir() else _make_durable(path)
        new.replace(self.path)
        fsync_folder(self.path.parent)

    def _require_same(self, found: Header) -> None:
        if found.fingerprint == self.header.fingerprint:
            return
        wanted = self.header.model_dump()
        differs = [
            f"{key} is {value}, wanted {wanted[key]}"
            for key, value in found.model_dump().items()
            if value != wanted[key]
        ]
        raise StoreError(
            f"{self.path} holds other hidden states than these ({'; '.join(differs)}); "
            "remove it, then run `dvc repro extract`"
        )

    def remove_leftovers(self) -> None:
        """Remove all that is unfinished; nobody may be writing."""
        for partial in self.path.rglob("*.partial"):
            partial.unlink()
        for shard in set(range(self.header.num_shards)) - self.done:
            self.clear(shard)

    def clear(self, shard: int) -> None:
        """Remove what an unfinished shard may have on disk."""
        marker_path(self.path, shard).unlink(missing_ok=True)
        for array in self._arrays.values():
            array.file(shard).unlink(missing_ok=True)


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync_folder(path.parent)
