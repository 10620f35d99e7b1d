"""Our reader of shards and Zarr's own read the same bytes to the same values."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from toy_store import toy_header, write_toy_store

from eagle3.errors import StoreError
from eagle3.store.layout import open_arrays
from eagle3.store.packing import unpack
from eagle3.store.place import Folder
from eagle3.store.states import StateStore

UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4"}


def read_by_zarr(path: Path, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    header, arrays = StateStore.open(path).header, {}
    for name, spec in header.arrays.items():
        array = zarr.open_array(path / name, mode="r")
        planes = np.moveaxis(np.asarray(array[start:stop]), 1, -1)
        arrays[name] = np.ascontiguousarray(planes).view(UNSIGNED[spec.width])[..., 0]
    return unpack(header.dtype, arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (3, 5), (14, 50), (63, 64)])
def test_zarr_reads_the_same_states(tmp_path: Path, dtype: str, start: int, stop: int) -> None:
    write_toy_store(tmp_path / "train.zarr", dtype=dtype)
    found = StateStore.open(tmp_path / "train.zarr").read(start, stop)

    assert all(map(torch.equal, found, read_by_zarr(tmp_path / "train.zarr", start, stop)))


@pytest.mark.parametrize(("chunk", "shard"), [(1, 1), (5, 20), (7, 70), (64, 64), (100, 100)])
def test_chunks_and_shards_of_any_size_are_read(tmp_path: Path, chunk: int, shard: int) -> None:
    write_toy_store(tmp_path / "train.zarr")
    write_toy_store(tmp_path / "other.zarr", chunk_tokens=chunk, shard_tokens=shard)
    wanted = StateStore.open(tmp_path / "train.zarr").read(9, 64)
    store = StateStore.open(tmp_path / "other.zarr")

    assert all(map(torch.equal, store.read(9, 64), wanted))


def test_what_zarr_writes_is_read_as_it_was(tmp_path: Path) -> None:
    """It orders chunks in its own way, and leaves out those of nothing but the fill value."""
    header = toy_header()
    write_toy_store(tmp_path / "train.zarr")
    value = torch.tensor([0x3FFF], dtype=torch.int16).view(torch.bfloat16)[0]
    for name in ("aux", "last"):
        array = zarr.open_array(tmp_path / "train.zarr" / name, mode="r+")
        array[:] = 0xFF
        array[:, 1] = 0x3F
    arrays = open_arrays(Folder(tmp_path / "train.zarr"), header)
    found = {name: array.empty(64) for name, array in arrays.items()}
    for name, array in arrays.items():
        for piece in array.pieces(0, 64, found[name]):
            piece()

    for states in unpack("bfloat16", found):
        assert (states == value).all()


def test_many_threads_read_one_store(tmp_path: Path) -> None:
    """In a process of its own, with many threads that start at once on a store just opened."""
    write_toy_store(tmp_path / "train.zarr")
    program = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from eagle3.store.states import StateStore
store = StateStore.open(Path(sys.argv[1]))
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda start: store.read(start % 60, 64), range(400)))
wanted = StateStore.open(Path(sys.argv[1])).read(0, 64)
for start, pair in enumerate(found):
    assert all(torch.equal(a, b[start % 60 :]) for a, b in zip(pair, wanted, strict=True)), start
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "train.zarr")],
        check=True,
        cwd=Path(__file__).parents[3],
    )


def test_an_index_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_toy_store(tmp_path / "train.zarr")
    store = StateStore.open(tmp_path / "train.zarr")
    (tmp_path / "train.zarr" / "aux" / "c.1.0.0.0").write_bytes(b"short")

    with pytest.raises(StoreError, match=r"too short for its index.*run `dvc repro --force"):
        store.read(16, 20)
