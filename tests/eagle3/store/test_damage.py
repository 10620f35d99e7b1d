"""One byte that changes anywhere in a store is found, and its file is named."""

import random
from pathlib import Path

import pytest
import torch
from toy_store import write_toy_store

from eagle3.errors import StoreError
from eagle3.store.states import StateStore

SHARDS = range(4)
ROWS = ("tokens", "loss_mask", "offsets", "domain", "row_id")
STATIC = [
    "static.json",
    *(f"{name}zarr.json" for name in ("", "aux/", "last/", "scale/", "rows/")),
    *(f"rows/{name}/zarr.json" for name in ROWS),
    # Zarr writes no chunk of zeros alone, and the toy has one domain.
    *(f"rows/{name}/c/0" for name in ROWS if name != "domain"),
]
MARKERS = [f"shards/{shard:05d}.json" for shard in SHARDS]
STATES = [
    file
    for shard in SHARDS
    for file in (f"aux/c.{shard}.0.0.0", f"last/c.{shard}.0.0", f"scale/c.{shard}.0.0")
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A float8 store: it has every kind of file."""
    write_toy_store(tmp_path / "train.zarr", dtype="float8")
    return tmp_path / "train.zarr"


def named_by_verify(store: Path) -> str:
    """The files that verify names, or the error if the store does not even open."""
    try:
        return " ".join(fault.file for fault in StateStore.open(store).verify())
    except StoreError as error:
        return str(error)


def flip(file: Path, place: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def test_these_are_all_files_of_a_store(path: Path) -> None:
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {*STATIC, *MARKERS, *STATES}


@pytest.mark.parametrize("file", [*STATIC, *MARKERS[:2], *STATES[:3], *STATES[-3:]])
def test_a_flipped_bit_of_any_file_is_named(path: Path, file: str) -> None:
    whole = (path / file).read_bytes()
    draw = random.Random(file)
    places = {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(6))}
    for place in sorted(places):
        flip(path / file, place, draw.randrange(8))
        assert file in named_by_verify(path), f"byte {place}"
        (path / file).write_bytes(whole)
    assert named_by_verify(path) == ""


@pytest.mark.parametrize("file", [*STATIC, *MARKERS[:1], *STATES[:3]])
def test_a_file_that_is_cut_short_is_named(path: Path, file: str) -> None:
    whole = (path / file).read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        (path / file).write_bytes(whole[:length])
        assert file in named_by_verify(path), f"{length} bytes"


@pytest.mark.parametrize("file", [file for file in STATIC if file != "zarr.json"])
def test_a_file_that_is_gone_is_named(path: Path, file: str) -> None:
    (path / file).unlink()

    assert Path(file).name in named_by_verify(path)


@pytest.mark.parametrize("file", ["aux/c.1.0.0.0", "last/c.1.0.0", "scale/c.1.0.0"])
def test_no_flipped_byte_is_ever_read_as_other_states(path: Path, file: str) -> None:
    """Without verify: by the checksums of chunks and of their index, which reading compares."""
    expected = StateStore.open(path).read(16, 32)
    whole = (path / file).read_bytes()
    errors = []
    for place in range(0, len(whole), 5):
        flip(path / file, place, place % 8)
        try:
            found = StateStore.open(path).read(16, 32)
        except StoreError as error:
            errors.append(str(error))
        else:
            assert all(map(torch.equal, found, expected)), f"byte {place}"
        (path / file).write_bytes(whole)
    assert len(errors) > 0.9 * len(range(0, len(whole), 5))
    assert all(file.partition("/")[0] in error for error in errors)


def test_work_with_a_damaged_description_is_not_continued(path: Path) -> None:
    flip(path / "aux" / "zarr.json", 30, 0)

    with pytest.raises(StoreError, match=r"aux/zarr.json is damaged: .*; remove .*train.zarr"):
        write_toy_store(path, dtype="float8")


def test_a_store_of_an_older_version_says_what_to_do(path: Path) -> None:
    (path / "static.json").unlink()

    with pytest.raises(StoreError, match=r"has no static.json.*then run `dvc repro extract`"):
        StateStore.open(path)
