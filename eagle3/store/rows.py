"""Ragged rows of tokens at rest: one flat token array, its loss mask, and where each row starts.

Shapes: N tokens of all rows together, R rows, R1 = R + 1.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from eagle3.errors import StoreError

# 4 MiB of tokens: a corpus of 17M tokens is 17 files, and a small one is one.
CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Rows:
    """One split of a corpus. A row's id is its identity, not its position."""

    tokens_N: np.ndarray
    """int32: ids of the target's vocabulary, row after row."""
    loss_mask_N: np.ndarray
    """bool: True on tokens that the target wrote as an answer, its end token included."""
    offsets_R1: np.ndarray
    """int64: row i is `offsets[i]` up to, without, `offsets[i + 1]`."""
    domains: tuple[str, ...]
    row_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.tokens_N.dtype == np.int32, self.tokens_N.dtype
        assert self.loss_mask_N.dtype == np.bool_, self.loss_mask_N.dtype
        assert self.offsets_R1.dtype == np.int64, self.offsets_R1.dtype
        assert self.tokens_N.shape == self.loss_mask_N.shape == (self.offsets_R1[-1],)
        assert self.offsets_R1[0] == 0
        assert (np.diff(self.offsets_R1) > 0).all(), "a row without tokens"
        assert len(self.domains) == len(self.row_ids) == len(self.offsets_R1) - 1
        assert len(set(self.row_ids)) == len(self.row_ids), "two rows of one id"

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, N."""
        return len(self.tokens_N)

    def span(self, row: int) -> slice:
        """Where a row lies in every array along N: the corpus's and the hidden-state store's."""
        return slice(int(self.offsets_R1[row]), int(self.offsets_R1[row + 1]))


def rows_sha256(rows: Rows) -> str:
    """Hash all that the rows say: equal rows give equal digits on every machine."""
    digest = hashlib.sha256()
    for array, dtype in (
        (rows.tokens_N, "<i4"),
        (rows.loss_mask_N, "|b1"),
        (rows.offsets_R1, "<i8"),
    ):
        digest.update(np.ascontiguousarray(array, dtype=dtype).data)
    digest.update(json.dumps([rows.domains, rows.row_ids]).encode())
    return digest.hexdigest()


def save_rows(rows: Rows, path: Path) -> None:
    """Write the rows as a Zarr v3 group, in place of what may be there."""
    names = sorted(set(rows.domains))
    code_of = {name: code for code, name in enumerate(names)}
    group = zarr.create_group(store=path, zarr_format=3, overwrite=True)
    _put(group, "tokens", rows.tokens_N)
    _put(group, "loss_mask", rows.loss_mask_N)
    _put(group, "offsets", rows.offsets_R1)
    _put(group, "domain", np.array([code_of[name] for name in rows.domains], dtype=np.int32))
    # Zarr v3 has no settled text type: the ids are the bytes of one JSON list.
    _put(group, "row_id", np.frombuffer(json.dumps(rows.row_ids).encode(), dtype=np.uint8))
    group.attrs.update({"domains": names, "sha256": rows_sha256(rows)})


def load_rows(path: Path) -> Rows:
    """Read what `save_rows` wrote.

    Raises:
        StoreError: missing, unfinished or damaged; Zarr itself reads a missing chunk as zeros, so
            the content is compared with the hash that was written last.
    """
    fix = "run `dvc repro corpus`"
    if not (path / "zarr.json").is_file():
        raise StoreError(f"{path} holds no rows; {fix}")
    try:
        group = zarr.open_group(path, mode="r")
        names, recorded = group.attrs.get("domains"), group.attrs.get("sha256")
        if not isinstance(names, list) or not isinstance(recorded, str):
            raise StoreError(f"{path} is unfinished: it has no hash of its content; {fix}")
        rows = _read(group, names)
    except (KeyError, ValueError, IndexError, AssertionError, RuntimeError) as error:
        raise StoreError(f"{path} is damaged: {error!r}; {fix}") from error
    found = rows_sha256(rows)
    if found != recorded:
        raise StoreError(
            f"{path} is damaged: its rows hash to {found[:12]}, but {recorded[:12]} was written; "
            f"{fix}"
        )
    return rows


def _read(group: zarr.Group, names: list[Any]) -> Rows:
    return Rows(
        tokens_N=_get(group, "tokens"),
        loss_mask_N=_get(group, "loss_mask"),
        offsets_R1=_get(group, "offsets"),
        domains=tuple(str(names[code]) for code in _get(group, "domain")),
        row_ids=tuple(json.loads(_get(group, "row_id").tobytes())),
    )


def _put(group: zarr.Group, name: str, values: np.ndarray) -> None:
    group.create_array(name, data=values, chunks=(CHUNK,))


def _get(group: zarr.Group, name: str) -> np.ndarray:
    array = group[name]
    if not isinstance(array, zarr.Array):
        raise KeyError(name)
    return np.asarray(array[:])
