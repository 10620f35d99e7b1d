"""Reading a finished store of hidden states, and finding what is damaged in it.

Shapes: N tokens of a split, n tokens of a range, H target width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from eagle3.artifacts import fingerprint_of
from eagle3.errors import StoreError
from eagle3.store.layout import (
    DESCRIPTION,
    ROWS,
    Header,
    marker_name,
    open_arrays,
    read_header,
    read_marker,
    read_static,
    token_ids_sha256,
)
from eagle3.store.packing import unpack
from eagle3.store.place import Place
from eagle3.store.pointer import POINTER, Pointer, Where, is_url, place_of
from eagle3.store.refused import RefusedRows, RowsRead, read_rows
from eagle3.store.rows import Rows, load_rows, rows_sha256
from eagle3.store.seals import Marker, Seal, damaged


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
    refused_rows: int
    """Rows without states, since one of theirs was no number."""
    dtype: str
    """At rest; float8 is read as bfloat16."""
    fingerprint: str
    target: str


class StateStore:
    """Hidden states of one split, token for token with the corpus rows. Threads may share one."""

    def __init__(
        self, place: Place, header: Header, markers: list[Marker], threads: int | None = None
    ) -> None:
        self._place, self.header, self._markers = place, header, markers
        self.refused = RefusedRows(row for marker in markers for row in marker.refused)
        self._arrays = open_arrays(place, header)
        self._threads = threads or place.readers
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="read-states")

    @classmethod
    def open(cls, where: Where, threads: int | None = None) -> "StateStore":
        """Open a finished store by its path or URL, or the one that a folder points to.

        `threads` read it at a time; None for as many as are worth it where it lies.

        Raises:
            StoreError: no store, an unfinished one, another one than the folder points to, or files
                that are missing or cut short.
            StorageError: its bucket cannot be reached.
        """
        pointer = None if is_url(where) else Pointer.find(Path(where))
        if pointer is None:
            return cls.at(place_of(where), threads)
        try:
            store = cls.at(place_of(pointer.url), threads)
        except StoreError as error:
            # DVC sees the pointer alone, and calls it up to date.
            what = str(error).replace("`dvc repro extract`", "`dvc repro --force extract`")
            raise StoreError(
                f"{Path(where) / POINTER} points to hidden states, but {what}"
            ) from error
        pointer.require(Path(where), store.header.fingerprint, store.sha256)
        return store

    @classmethod
    def at(cls, place: Place, threads: int | None = None) -> "StateStore":
        """Open a finished store; see `open`."""
        sizes = place.sizes()
        header = read_header(place, sizes)
        shards = range(header.num_shards)
        with ThreadPoolExecutor(place.readers) as pool:
            found = list(pool.map(lambda shard: read_marker(place, shard), shards))
        markers = [marker for marker in found if marker is not None]
        if len(markers) < len(shards):
            raise StoreError(
                f"{place} is unfinished: {len(markers)} of its {len(shards)} shards are done; "
                "run `dvc repro extract`"
            )
        for marker in markers:
            for name, seal in marker.files.items():
                if what := seal.size_fault(sizes, name):
                    raise damaged(place.file(name), what)
        return cls(place, header, markers, threads)

    @staticmethod
    def is_at(where: Where) -> bool:
        """Whether there is a store, be it unfinished or damaged."""
        pointer = None if is_url(where) else Pointer.find(Path(where))
        return DESCRIPTION in place_of(pointer.url if pointer else where).sizes()

    @classmethod
    def growing(cls, path: Path) -> "StateStore":
        """Open a store that is being written: whoever reads knows which shards are sealed.

        Raises:
            StoreError: there is no store, or its description is damaged.
        """
        place = place_of(path)
        return cls(place, read_header(place, place.sizes()), [])

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
            with self._place.folder(ROWS) as folder:
                rows = load_rows(folder)
        except StoreError as error:
            raise damaged(self._place.file(ROWS), str(error).partition(";")[0]) from error
        if rows_sha256(rows) != self.header.rows_sha256:
            raise damaged(self._place.file(ROWS), "it holds other rows than the header names")
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
            refused_rows=len(self.refused),
            dtype=header.dtype,
            fingerprint=header.fingerprint,
            target=header.target,
        )

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """States of tokens [start, stop): aux [n, 3, H] and last [n, H]; see `read_spans`."""
        return self.read_spans([slice(start, stop)])

    def read_spans(self, spans: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """States of some ranges of tokens, one behind the other: aux [n, 3, H] and last [n, H].

        All chunks are decoded side by side. Their dtype is the header's, but bfloat16 for float8.

        Raises:
            StoreError: a shard is missing or its checksums do not hold; a row was refused.
        """
        self.refused.require_none(str(self._place), spans)
        bounds = np.cumsum([0, *(span.stop - span.start for span in spans)]).tolist()
        found = {name: array.empty(bounds[-1]) for name, array in self._arrays.items()}
        pieces: list[Callable[[], None]] = []
        for span, start, stop in zip(spans, bounds[:-1], bounds[1:], strict=True):
            assert 0 <= span.start < span.stop <= self.header.tokens, span
            for name, array in self._arrays.items():
                pieces += array.pieces(span.start, span.stop, found[name][start:stop])
        self._do(pieces)
        return unpack(self.header.dtype, found)

    def read_rows(self, spans: Sequence[slice]) -> RowsRead:
        """As `read_spans` for the spans of whole rows, with zeros for those that were refused."""
        return read_rows(self.refused, self.read_spans, spans)

    def rows_with_states(self, rows: Rows) -> list[int]:
        """Numbers of the rows that were not refused."""
        return [row for row in range(len(rows)) if self.refused.at(rows.span(row)) is None]

    def _do(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Do the pieces side by side; who is ready takes the next, the caller like the pool.

        Handing over each alone takes longer than many of them do.
        """
        left = iter(pieces)

        def take() -> None:
            for piece in left:
                piece()

        others = min(len(pieces), self._threads) - 1
        helpers = [self._pool.submit(take) for _ in range(others)]
        try:
            take()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()

    def verify(self) -> list[ShardFault]:
        """Compare every byte with the checksums; no faults means that nothing changed."""
        sizes = self._place.sizes()
        static = read_static(self._place, sizes).files
        faults = [
            ShardFault(None, name, what, range(0), ())
            for name, what in self._looked_at(static, sizes)
        ]
        rows = None if faults else self.rows
        for shard, marker in enumerate(self._markers):
            span = self.header.span(shard)
            tokens, ids = range(span.start, span.stop), _ids(rows, span) if rows else ()
            found = list(self._looked_at(marker.files, sizes))
            if rows and token_ids_sha256(rows.tokens_N[span]) != marker.token_ids_sha256:
                what = "the states are of other token ids than the rows have"
                found.append((marker_name(shard), what))
            faults += [ShardFault(shard, name, what, tokens, ids) for name, what in found]
        return faults

    def _looked_at(
        self, seals: Mapping[str, Seal], sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, str]]:
        """Names and faults of the damaged files among these, each read to its end."""
        found = self._pool.map(lambda name: seals[name].fault(self._place, sizes, name), seals)
        yield from ((name, what) for name, what in zip(seals, found, strict=True) if what)


def _ids(rows: Rows, span: slice) -> tuple[str, ...]:
    first = int(np.searchsorted(rows.offsets_R1, span.start, side="right")) - 1
    behind = int(np.searchsorted(rows.offsets_R1, span.stop, side="left"))
    return rows.row_ids[first:behind]
