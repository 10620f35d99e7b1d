"""How hidden states lie on disk: one Zarr v3 group a split, sharded along tokens.

    train.zarr/zarr.json           the header below, as attributes
    train.zarr/rows/               the corpus rows that the states belong to (eagle3.store.rows)
    train.zarr/aux/c.7.0.0.0       shard 7 of `aux` [N, P, 3, H]
    train.zarr/last/c.7.0.0        shard 7 of `last` [N, P, H], before the final norm
    train.zarr/scale/c.7.0.0       shard 7 of `scale` [N, P, 4], of a float8 store alone
    train.zarr/shards/00007.json   the marker of shard 7: written after its data, never before; it
                                   names the rows that were refused (eagle3.store.refused)
    train.zarr/static.json         checksums of all files but the shards' own

The same names are those of objects in a bucket (eagle3.store.place says how either is reached).

Arrays are bytes: plane p holds byte p of every value, the lowest first (eagle3/store/packing.py).
Each plane of a chunk is a zstd frame (eagle3/store/frames.py). The choice, with what the others
left: docs/decisions/0005-layout-of-the-store.md.

Shapes: N tokens of a split, P bytes of a value, H target width.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import zarr
from pydantic import BaseModel, ConfigDict
from zarr.codecs import ZstdCodec

from eagle3.artifacts import fingerprint_of
from eagle3.config import StateDtype
from eagle3.errors import StoreError
from eagle3.store.packing import MISSING, READ_DTYPES, ArraySpec, array_specs
from eagle3.store.place import Place
from eagle3.store.seals import Marker, Seal, StaticFiles, damaged
from eagle3.store.shards import ShardedArray

ROWS = "rows"
SHARDS = "shards"
STATIC = "static.json"
DESCRIPTION = "zarr.json"


class Header(BaseModel):
    """What a store holds and was made from. Two stores of one fingerprint hold the same states."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attribute: ClassVar[str] = "eagle3"

    target: str
    """The target's source, for people."""
    target_fingerprint: str
    rows_sha256: str
    tokens: int
    rows: int
    hidden_size: int
    aux_layers: tuple[int, int, int]
    """In our convention: the residual stream after that many layers."""
    last: str
    dtype: StateDtype
    engine: str
    chunk_tokens: int
    shard_tokens: int

    @property
    def fingerprint(self) -> str:
        """Identity of the store."""
        return fingerprint_of(self.model_dump(mode="json"))

    @property
    def num_shards(self) -> int:
        """Shards of the whole store."""
        return -(-self.tokens // self.shard_tokens)

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays by name."""
        return array_specs(self.dtype, self.hidden_size)

    @property
    def raw_bytes(self) -> int:
        """Bytes of four states of every token, as a reader gets them."""
        return self.tokens * 4 * self.hidden_size * READ_DTYPES[self.dtype].itemsize

    def span(self, shard: int) -> slice:
        """Tokens of a shard."""
        start = shard * self.shard_tokens
        return slice(start, min(start + self.shard_tokens, self.tokens))


def token_ids_sha256(tokens_N: np.ndarray) -> str:
    """Hash token ids, whatever machine they are on."""
    return hashlib.sha256(np.ascontiguousarray(tokens_N, dtype="<i4").data).hexdigest()


def marker_name(shard: int) -> str:
    """The marker of a shard."""
    return f"{SHARDS}/{shard:05d}.json"


def create_arrays(path: Path, header: Header) -> None:
    """Describe the empty store in a new folder."""
    group = zarr.create_group(store=path, zarr_format=3)
    for name, spec in header.arrays.items():
        group.create_array(
            name,
            shape=(header.tokens, spec.width, *spec.inner),
            dtype=np.uint8,
            chunks=(header.chunk_tokens, 1, *spec.inner),
            shards=(header.shard_tokens, spec.width, *spec.inner),
            filters=None,
            # The checksum of every chunk is verified by whoever reads it. The level is that of what
            # Zarr would write; our own frames are of other settings, which no reader asks for.
            compressors=[ZstdCodec(level=1, checksum=True)],
            fill_value=MISSING,
            chunk_key_encoding={"name": "default", "separator": "."},
        )
    group.attrs.update({Header.attribute: header.model_dump(mode="json")})


def open_arrays(place: Place, header: Header) -> dict[str, ShardedArray]:
    """The arrays of a store by name."""
    return {
        name: ShardedArray(place, name, spec, header.chunk_tokens, header.shard_tokens)
        for name, spec in header.arrays.items()
    }


def seal_static_files(path: Path) -> None:
    """Write the checksums of a new store's files, of which none will change."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    seals = {file.relative_to(path).as_posix(): Seal.of(file) for file in files}
    (path / STATIC).write_bytes(StaticFiles(files=seals).content)


def read_static(place: Place, sizes: Mapping[str, int]) -> StaticFiles:
    """The checksums of the files that a store was made with.

    Raises:
        StoreError: no store, one of another version, or the checksums themselves are damaged.
    """
    if DESCRIPTION not in sizes:
        raise StoreError(f"{place} holds no hidden states; run `dvc repro extract`")
    try:
        return StaticFiles.parse(place.read(STATIC))
    except FileNotFoundError as error:
        raise StoreError(
            f"{place} has no {STATIC}: it holds no hidden states of this version of eagle3; "
            f"remove {place}, then run `dvc repro extract`"
        ) from error
    except ValueError as error:
        raise _remade(place, STATIC, f"{error}") from error


def read_header(place: Place, sizes: Mapping[str, int]) -> Header:
    """Read what a store says of itself, and compare the descriptions with their checksums.

    Raises:
        StoreError: no store, one of another version, or a damaged description.
    """
    for name, seal in read_static(place, sizes).files.items():
        # The rows are large, and have a hash of their own that is compared whenever they are read.
        large = name.startswith(f"{ROWS}/")
        if what := seal.size_fault(sizes, name) if large else seal.fault(place, sizes, name):
            raise _remade(place, name, what)
    try:
        group = json.loads(place.read(DESCRIPTION))
        return Header.model_validate(group["attributes"].get(Header.attribute))
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"{place.file(DESCRIPTION)} does not describe hidden states of this version of eagle3 "
            f"({error}); remove {place}, then run `dvc repro extract`"
        ) from error


def read_marker(place: Place, shard: int) -> Marker | None:
    """The marker of a shard; None if the shard is not finished.

    Raises:
        StoreError: the marker is damaged.
    """
    try:
        return Marker.parse(place.read(marker_name(shard)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged(place.file(marker_name(shard)), str(error)) from error


def is_done(place: Place, sizes: Mapping[str, int], shard: int) -> bool:
    """Whether a shard has its marker, and files as long as that says."""
    if marker_name(shard) not in sizes:
        return False
    try:
        marker = read_marker(place, shard)
    except StoreError:
        return False
    return marker is not None and not any(
        seal.size_fault(sizes, name) for name, seal in marker.files.items()
    )


def _remade(place: Place, name: str, what: str) -> StoreError:
    """The fault of a file without which nothing of the store can be trusted."""
    return StoreError(
        f"{place.file(name)} is damaged: {what}; remove {place}, then run `dvc repro extract`"
    )
