"""Reading a finished store of hidden states, and finding what is damaged in it.

Shapes: N tokens of a split, n tokens of a range, H target width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zarr
from torch import Tensor

from eagle3.artifacts import fingerprint_of
from eagle3.errors import StoreError
from eagle3.store.layout import (
    ROWS,
    Header,
    Marker,
    Seal,
    marker_path,
    open_arrays,
    read_header,
    read_marker,
    shard_files,
    size_fault,
    token_ids_sha256,
)
from eagle3.store.rows import Rows, load_rows, rows_sha256


@dataclass(frozen=True)
class ShardFault:
    """Something wrong with one shard of a store."""

    shard: int
    file: str
    """Path within the store."""
    what: str
    tokens: range
    rows: tuple[str, ...]
    """Ids of the rows that have tokens in the shard."""


@dataclass(frozen=True)
class StoreInfo:
    """The size of a store and what it was made from."""

    tokens: int
    rows: int
    bytes: int
    raw_bytes: int
    """Bytes of the states as they are, four of each token."""
    ratio: float
    """Bytes over raw bytes."""
    fingerprint: str
    target: str


class StateStore:
    """Hidden states of one split, token for token with the corpus rows. Threads may share one."""

    def __init__(self, path: Path, header: Header, markers: list[Marker]) -> None:
        self.path, self.header, self._markers = path, header, markers
        self._arrays = open_arrays(path, "r")

    @classmethod
    def open(cls, path: Path) -> "StateStore":
        """Open a finished store.

        Raises:
            StoreError: no store, an unfinished one, or files that are missing or cut short.
        """
        header = read_header(path)
        found = [read_marker(path, shard) for shard in range(header.num_shards)]
        markers = [marker for marker in found if marker is not None]
        if len(markers) < header.num_shards:
            raise StoreError(
                f"{path} is unfinished: {len(markers)} of its {header.num_shards} shards are done; "
                "run `dvc repro extract`"
            )
        for marker in markers:
            for name, seal in marker.files.items():
                if what := size_fault(path / name, seal):
                    raise _damaged(path / name, what)
        return cls(path, header, markers)

    @property
    def sha256(self) -> str:
        """Hash of all states, by way of the checksums in the markers."""
        return fingerprint_of([marker.model_dump() for marker in self._markers])

    @property
    def rows(self) -> Rows:
        """The rows that the states belong to.

        Raises:
            StoreError: they are damaged, or not those that the header names.
        """
        try:
            rows = load_rows(self.path / ROWS)
        except StoreError as error:
            raise _damaged(self.path / ROWS, str(error).partition(";")[0]) from error
        if rows_sha256(rows) != self.header.rows_sha256:
            raise _damaged(self.path / ROWS, "it holds other rows than the header names")
        return rows

    @property
    def info(self) -> StoreInfo:
        """The size of the store and what it was made from."""
        size = sum(seal.bytes for marker in self._markers for seal in marker.files.values())
        header = self.header
        return StoreInfo(
            tokens=header.tokens,
            rows=header.rows,
            bytes=size,
            raw_bytes=header.raw_bytes,
            ratio=size / max(1, header.raw_bytes),
            fingerprint=header.fingerprint,
            target=header.target,
        )

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """States of tokens [start, stop): aux [n, 3, H] and last [n, H], in the header's dtype.

        Raises:
            StoreError: a shard is missing, or its checksums do not hold.
        """
        assert 0 <= start < stop <= self.header.tokens, (start, stop)
        first, last = start // self.header.shard_tokens, (stop - 1) // self.header.shard_tokens
        for shard in range(first, last + 1):
            # Zarr reads a missing shard as fill values without a word.
            for name in shard_files(shard).values():
                if not (self.path / name).is_file():
                    raise _damaged(self.path / name, "it is missing")
        aux_n3H, last_nH = (
            self._read(self._arrays[name], slice(start, stop), f"{first} to {last}")
            for name in ("aux", "last")
        )
        return aux_n3H, last_nH

    def verify(self) -> list[ShardFault]:
        """Compare every byte with the checksums; no faults means that nothing changed.

        Raises:
            StoreError: the rows that the states belong to are damaged.
        """
        rows = self.rows
        faults = []
        for shard, marker in enumerate(self._markers):
            span = self.header.span(shard)
            for file, what in self._faults(marker, rows, span):
                faults.append(
                    ShardFault(shard, file, what, range(span.start, span.stop), _ids(rows, span))
                )
        return faults

    def _faults(self, marker: Marker, rows: Rows, span: slice) -> Iterator[tuple[str, str]]:
        for name, seal in marker.files.items():
            path = self.path / name
            if not path.is_file():
                yield name, "missing"
            elif (found := Seal.of(path)) != seal:
                yield name, f"sha256 {found.sha256[:12]}, but {seal.sha256[:12]} was written"
        if token_ids_sha256(rows.tokens_N[span]) != marker.token_ids_sha256:
            name = str(marker_path(Path(), span.start // self.header.shard_tokens))
            yield name, "the states are of other token ids than the rows have"

    def _read(self, array: zarr.Array, span: slice, shards: str) -> Tensor:
        try:
            return as_states(np.asarray(array[span]))
        except (RuntimeError, ValueError) as error:
            raise _damaged(
                self.path / array.name.strip("/"), f"shards {shards}: {error}"
            ) from error


def as_bits(states: Tensor) -> np.ndarray:
    """States as Zarr takes them: bfloat16 as uint16 of the same bits."""
    return (states.view(torch.uint16) if states.dtype == torch.bfloat16 else states).numpy()


def as_states(bits: np.ndarray) -> Tensor:
    """States from what Zarr gives."""
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(f"{path} is damaged: {what}; run `dvc repro --force extract`")


def _ids(rows: Rows, span: slice) -> tuple[str, ...]:
    first = int(np.searchsorted(rows.offsets_R1, span.start, side="right")) - 1
    behind = int(np.searchsorted(rows.offsets_R1, span.stop, side="left"))
    return rows.row_ids[first:behind]
