"""How hidden states lie on disk: one Zarr v3 group a split, sharded along tokens.

    train.zarr/zarr.json           the header below, as attributes
    train.zarr/rows/               the corpus rows that the states belong to (eagle3.store.rows)
    train.zarr/aux/c.7.0.0         shard 7 of `aux` [N, 3, H]
    train.zarr/last/c.7.0          shard 7 of `last` [N, H], before the final norm
    train.zarr/shards/00007.json   the marker of shard 7: written after its data, never before

Zarr has no bfloat16: its bits are uint16, and the header names the dtype. Values are shuffled by
byte and then packed by zstd level 1. The demo's train split (SmolLM2, 34,585 tokens) takes 0.64 of
its raw bytes so, its eval split in float32 0.80; on one shard of the first, Blosc's zstd level 5
left 0.72 where this left 0.64. Levels 3 and 5 left more than level 1 did, on one text of 1,024
tokens; channel-major left 0.01 less there, and was not taken further.

Shapes: N tokens of a split, H target width.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import zarr
from pydantic import BaseModel, ConfigDict
from zarr.codecs import ZstdCodec
from zarr.codecs.numcodecs import Shuffle
from zarr.errors import ZarrUserWarning

from eagle3.artifacts import file_sha256, fingerprint_of
from eagle3.config import Dtype
from eagle3.errors import StoreError

ROWS = "rows"
SHARDS = "shards"
ARRAYS = ("aux", "last")

# A shard that is not there reads as this NaN, and no state is one: zeros would pass for states.
BITS: dict[Dtype, tuple[type[np.generic], float | int]] = {
    "bfloat16": (np.uint16, 0x7FC0),
    "float32": (np.float32, math.nan),
}


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
    dtype: Dtype
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
    def raw_bytes(self) -> int:
        """Bytes of four states of every token, as they are."""
        return self.tokens * 4 * self.hidden_size * np.dtype(BITS[self.dtype][0]).itemsize

    def span(self, shard: int) -> slice:
        """Tokens of a shard."""
        start = shard * self.shard_tokens
        return slice(start, min(start + self.shard_tokens, self.tokens))


class Seal(BaseModel):
    """What a finished file must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Seal":
        """The seal of a file as it is now."""
        return cls(bytes=path.stat().st_size, sha256=file_sha256(path))


class Marker(BaseModel):
    """A finished shard: its files are durable, and these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int
    stop: int
    token_ids_sha256: str
    """Of the ids that the states belong to, as little-endian int32."""
    files: dict[str, Seal]
    """By path within the store."""


def token_ids_sha256(tokens_N: np.ndarray) -> str:
    """Hash token ids, whatever machine they are on."""
    return hashlib.sha256(np.ascontiguousarray(tokens_N, dtype="<i4").data).hexdigest()


def shard_files(shard: int) -> dict[str, str]:
    """Array name to the path of one of its shards, within the store."""
    return {"aux": f"aux/c.{shard}.0.0", "last": f"last/c.{shard}.0"}


def marker_path(store: Path, shard: int) -> Path:
    """Where the marker of a shard lies."""
    return store / SHARDS / f"{shard:05d}.json"


def create_arrays(path: Path, header: Header) -> None:
    """Describe the empty store in a new folder."""
    group = zarr.create_group(store=path, zarr_format=3)
    number, missing = BITS[header.dtype]
    inner: dict[str, tuple[int, ...]] = {
        "aux": (3, header.hidden_size),
        "last": (header.hidden_size,),
    }
    with _unspecified_codec_is_meant():
        for name, shape in inner.items():
            group.create_array(
                name,
                shape=(header.tokens, *shape),
                dtype=number,
                chunks=(header.chunk_tokens, *shape),
                shards=(header.shard_tokens, *shape),
                filters=None,
                compressors=[
                    Shuffle(elementsize=np.dtype(number).itemsize),
                    # The checksum of every chunk is verified by whoever reads it.
                    ZstdCodec(level=1, checksum=True),
                ],
                fill_value=missing,
                chunk_key_encoding={"name": "default", "separator": "."},
            )
    group.attrs.update({Header.attribute: header.model_dump(mode="json")})


def open_arrays(path: Path, mode: Literal["r", "r+"]) -> dict[str, zarr.Array]:
    """The arrays of a store by name."""
    with _unspecified_codec_is_meant():
        return {name: zarr.open_array(path / name, mode=mode) for name in ARRAYS}


def read_header(path: Path) -> Header:
    """Read what a store says of itself.

    Raises:
        StoreError: no store, or one of another version.
    """
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} holds no hidden states; run `dvc repro extract`")
    try:
        attributes = zarr.open_group(path, mode="r").attrs.asdict()
        return Header.model_validate(attributes.get(Header.attribute))
    except ValueError as error:
        raise StoreError(
            f"{path / 'zarr.json'} does not describe hidden states of this version of eagle3 "
            f"({error}); remove {path}, then run `dvc repro extract`"
        ) from error


def read_marker(path: Path, shard: int) -> Marker | None:
    """The marker of a shard; None if the shard is not finished.

    Raises:
        StoreError: the marker is damaged.
    """
    marker = marker_path(path, shard)
    try:
        return Marker.model_validate_json(marker.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(
            f"{marker} is damaged ({error}); run `dvc repro --force extract`"
        ) from error


def is_done(path: Path, shard: int) -> bool:
    """Whether a shard has its marker, and files as long as that says."""
    try:
        marker = read_marker(path, shard)
    except StoreError:
        return False
    return marker is not None and not any(
        size_fault(path / name, seal) for name, seal in marker.files.items()
    )


def size_fault(path: Path, seal: Seal) -> str:
    """What a look at the folder says is wrong with a file; empty if nothing."""
    if not path.is_file():
        return "it is missing"
    found = path.stat().st_size
    return "" if found == seal.bytes else f"it has {found} bytes of {seal.bytes}"


@contextmanager
def _unspecified_codec_is_meant() -> Iterator[None]:
    """Byte shuffle is a codec of numcodecs, which zarr warns about at every opening."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Numcodecs codecs are not in", ZarrUserWarning)
        yield
