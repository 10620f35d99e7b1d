"""Writing a store of hidden states so that a kill at any instant loses no finished shard.

A shard is written whole, in one go: its data, made durable; then its marker. What has no marker is
not there, and is removed by whoever goes on. One process starts a store; others may then write to
it, too, each shard by one of them. In a bucket it is the same: an object is there when it was put
to its end (eagle3.store.place).

Shapes: n tokens of one shard, H target width.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import StoreError
from eagle3.store.layout import (
    DESCRIPTION,
    ROWS,
    SHARDS,
    Header,
    create_arrays,
    is_done,
    marker_name,
    open_arrays,
    read_header,
    read_marker,
    seal_static_files,
    token_ids_sha256,
)
from eagle3.store.packing import MISSING, WRITE_DTYPES, pack
from eagle3.store.pointer import Where, place_of
from eagle3.store.refused import Refused
from eagle3.store.rows import Rows, load_rows, save_rows
from eagle3.store.seals import Marker

log = logging.getLogger(__name__)


class StateWriter:
    """A store that grows shard by shard, in any order."""

    def __init__(self, where: Where, header: Header, rows: Rows, alone: bool = True) -> None:
        """Start a store at a path or URL, or go on with the one that is there.

        `alone`: nobody else writes to it now, so what is unfinished is nobody's, and is removed.

        Raises:
            StoreError: what is there was made from something else, or is damaged.
            StorageError: its bucket cannot be reached.
        """
        self.where, self.header, self.rows = where, header, rows
        self._place = place_of(where)
        sizes = self._place.sizes()
        if DESCRIPTION in sizes:
            self._require_same(read_header(self._place, sizes))
        else:
            self._place.make(self._build, last=DESCRIPTION)
        self._arrays = open_arrays(self._place, header)
        # Compression leaves Python to the others: a core for each plane of a chunk.
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="write-states")
        if alone:
            self.remove_leftovers()

    @classmethod
    def join(cls, where: Where) -> "StateWriter":
        """Write to a store that another process started, beside others.

        Raises:
            StoreError: there is no store.
        """
        place = place_of(where)
        header = read_header(place, place.sizes())
        with place.folder(ROWS) as folder:
            return cls(where, header, load_rows(folder), alone=False)

    @property
    def done(self) -> set[int]:
        """Shards that are finished."""
        return self._done_by(self._place.sizes())

    def refused(self, shards: Iterable[int]) -> list[Refused]:
        """Rows that the markers of finished shards name as refused; some come twice."""
        markers = self._pool.map(lambda shard: read_marker(self._place, shard), sorted(shards))
        return [refused for marker in markers if marker for refused in marker.refused]

    def write(
        self, shard: int, aux_n3H: Tensor, last_nH: Tensor, refused: Sequence[Refused] = ()
    ) -> None:
        """Write all tokens of a shard, in the dtype of `buffers`, and mark it as finished.

        Of refused rows nothing is kept but what the marker says, whatever the states given are.
        """
        span, files = self.header.span(shard), {}
        for name, values in pack(self.header.dtype, aux_n3H, last_nH).items():
            assert len(values) == span.stop - span.start, "a shard is written whole"
            for row in refused:
                # As much of the row as lies in the shard.
                here = slice(max(row.start - span.start, 0), max(row.stop - span.start, 0))
                values[here].view(np.uint8)[...] = MISSING
            array = self._arrays[name]
            files[array.file(shard)] = array.write(shard, values, self._pool)
        marker = Marker(
            start=span.start,
            stop=span.stop,
            token_ids_sha256=token_ids_sha256(self.rows.tokens_N[span]),
            refused=tuple(refused),
            files=files,
        )
        with self._place.create(marker_name(shard)) as file:
            file.write(marker.content)

    def buffers(self, shard: int) -> tuple[Tensor, Tensor]:
        """Room for the states of a shard: aux [n, 3, H] and last [n, H], to be filled."""
        span, width = self.header.span(shard), self.header.hidden_size
        count, dtype = span.stop - span.start, WRITE_DTYPES[self.header.dtype]
        return torch.empty(count, 3, width, dtype=dtype), torch.empty(count, width, dtype=dtype)

    def _build(self, folder: Path) -> None:
        """Put the files of the empty store into a folder."""
        create_arrays(folder, self.header)
        save_rows(self.rows, folder / ROWS)
        seal_static_files(folder)
        (folder / SHARDS).mkdir()

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
            f"{self._place} holds other hidden states than these ({'; '.join(differs)}); "
            "remove it, then run `dvc repro extract`"
        )

    def remove_leftovers(self) -> None:
        """Remove all that is unfinished; nobody may be writing."""
        self._place.remove_unfinished()
        sizes = self._place.sizes()
        for shard in set(range(self.header.num_shards)) - self._done_by(sizes):
            if any(name in sizes for name in self._files(shard)):
                self.clear(shard)

    def remove_damaged(self) -> None:
        """Read every finished shard to its end, and remove those that are not as they were written.

        For shards that somebody else may have made, or that are to be made again if damaged.
        """
        sizes = self._place.sizes()
        shards = sorted(self._done_by(sizes))
        whole = self._pool.map(lambda shard: self._is_whole(shard, sizes), shards)
        damaged = [shard for shard, good in zip(shards, whole, strict=True) if not good]
        for shard in damaged:
            self.clear(shard)
        if shards:
            log.info(
                "%s has %d finished shards already: %d are taken over, %d are damaged",
                *(self._place, len(shards), len(shards) - len(damaged), len(damaged)),
            )

    def clear(self, shard: int) -> None:
        """Remove what an unfinished shard may have left."""
        for name in self._files(shard):
            self._place.remove(name)

    def _is_whole(self, shard: int, sizes: Mapping[str, int]) -> bool:
        marker = read_marker(self._place, shard)
        return marker is not None and not any(
            seal.fault(self._place, sizes, name) for name, seal in marker.files.items()
        )

    def _files(self, shard: int) -> list[str]:
        """Names of a shard's files; first the marker, without which the others do not count."""
        return [marker_name(shard), *(array.file(shard) for array in self._arrays.values())]

    def _done_by(self, sizes: Mapping[str, int]) -> set[int]:
        shards = range(self.header.num_shards)
        found = self._pool.map(lambda shard: is_done(self._place, sizes, shard), shards)
        return {shard for shard, done in zip(shards, found, strict=True) if done}
