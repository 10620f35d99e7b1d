"""Reading a finished store of hidden states, and finding what is damaged in it.

Shapes: N tokens of a split, n tokens of a range, H target width.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from eagle3.artifacts import fingerprint_of
from eagle3.errors import StoreError
from eagle3.store.layout import (
    ROWS,
    Header,
    marker_path,
    open_arrays,
    read_header,
    read_marker,
    read_static,
    token_ids_sha256,
)
from eagle3.store.packing import unpack
from eagle3.store.rows import Rows, load_rows, rows_sha256
from eagle3.store.seals import Marker, damaged


@dataclass(frozen=True)
class ShardFault:
    """Something wrong with one file of a store."""

    shard: int | None
    """None for a file that belongs to all shards."""
    file: str
    """Path within the store."""
    what: str
    tokens: range
    rows: tuple[str, ...]
    """Ids of the rows that have tokens in the shard; none if the rows themselves are damaged."""


@dataclass(frozen=True)
class StoreInfo:
    """The size of a store and what it was made from."""

    tokens: int
    rows: int
    bytes: int
    raw_bytes: int
    """Bytes of the states as a reader gets them, four of each token."""
    ratio: float
    """Bytes over raw bytes."""
    dtype: str
    """At rest; float8 is read as bfloat16."""
    fingerprint: str
    target: str


class StateStore:
    """Hidden states of one split, token for token with the corpus rows. Threads may share one."""

    def __init__(self, path: Path, header: Header, markers: list[Marker]) -> None:
        self.path, self.header, self._markers = path, header, markers
        self._arrays = open_arrays(path, header)
        # Decompression leaves Python to the others: a core for each chunk of a range.
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="read-states")

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
                if what := seal.size_fault(path / name):
                    raise damaged(path / name, what)
        return cls(path, header, markers)

    @classmethod
    def growing(cls, path: Path) -> "StateStore":
        """Open a store that is being written: whoever reads knows which shards are sealed.

        Raises:
            StoreError: there is no store, or its description is damaged.
        """
        return cls(path, read_header(path), [])

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
            raise damaged(self.path / ROWS, str(error).partition(";")[0]) from error
        if rows_sha256(rows) != self.header.rows_sha256:
            raise damaged(self.path / ROWS, "it holds other rows than the header names")
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
            dtype=header.dtype,
            fingerprint=header.fingerprint,
            target=header.target,
        )

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """States of tokens [start, stop): aux [n, 3, H] and last [n, H].

        Their dtype is the header's, but bfloat16 for float8.

        Raises:
            StoreError: a shard is missing, or its checksums do not hold.
        """
        assert 0 <= start < stop <= self.header.tokens, (start, stop)
        found = {name: array.empty(stop - start) for name, array in self._arrays.items()}
        pieces = [
            piece
            for name, array in self._arrays.items()
            for piece in array.pieces(start, stop, found[name])
        ]
        for _ in self._pool.map(lambda piece: piece(), pieces):
            pass
        return unpack(self.header.dtype, found)

    def verify(self) -> list[ShardFault]:
        """Compare every byte with the checksums; no faults means that nothing changed."""
        faults = [
            ShardFault(None, name, what, range(0), ())
            for name, seal in read_static(self.path).files.items()
            if (what := seal.fault(self.path / name))
        ]
        rows = None if faults else self.rows
        for shard, marker in enumerate(self._markers):
            span = self.header.span(shard)
            tokens, ids = range(span.start, span.stop), _ids(rows, span) if rows else ()
            found = [(name, seal.fault(self.path / name)) for name, seal in marker.files.items()]
            if rows and token_ids_sha256(rows.tokens_N[span]) != marker.token_ids_sha256:
                name = str(marker_path(Path(), shard))
                found.append((name, "the states are of other token ids than the rows have"))
            faults += [ShardFault(shard, name, what, tokens, ids) for name, what in found if what]
        return faults


def _ids(rows: Rows, span: slice) -> tuple[str, ...]:
    first = int(np.searchsorted(rows.offsets_R1, span.start, side="right")) - 1
    behind = int(np.searchsorted(rows.offsets_R1, span.stop, side="left"))
    return rows.row_ids[first:behind]
