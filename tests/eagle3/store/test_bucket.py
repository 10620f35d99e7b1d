"""States in object storage: the same states, whole after a stop, and no credentials anywhere."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_server import KEY, SECRET, s3_server
from toy_store import ToyEngine, toy_header, toy_rows, write_toy_store

from eagle3.errors import StoreError
from eagle3.extract import TokenProgress, fill
from eagle3.progress import ConsoleReporter
from eagle3.store.bucket import Bucket
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture
def files(server: None) -> Any:
    """The server's file system, with an empty bucket `states`."""
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False)
    if files.exists("states"):
        files.rm("states", recursive=True)
    files.mkdir("states")
    return files


def write_remote_store(path: Path, engine: ToyEngine | None = None) -> StateStore:
    rows = toy_rows()
    writer = StateWriter(path, toy_header(), rows, url="s3://states/run/train.zarr")
    fill(writer, rows, engine or ToyEngine(), "train", TokenProgress(ConsoleReporter(), 64))
    return StateStore.open(path)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_states_are_read_from_the_bucket_as_from_the_disk(files: Any, tmp_path: Path) -> None:
    write_toy_store(tmp_path / "local.zarr")
    local, remote = (
        StateStore.open(tmp_path / "local.zarr"),
        write_remote_store(tmp_path / "r.zarr"),
    )

    for start, stop in ((0, 64), (5, 40), (63, 64)):
        for here, there in zip(local.read(start, stop), remote.read(start, stop), strict=True):
            assert torch.equal(here, there)
    assert (remote.sha256, remote.info) == (local.sha256, local.info)
    assert remote.verify() == []


def test_the_folder_holds_no_states_and_the_bucket_holds_the_whole_store(
    files: Any, tmp_path: Path
) -> None:
    write_toy_store(tmp_path / "local.zarr")
    write_remote_store(tmp_path / "r.zarr")

    local, here = files_of(tmp_path / "local.zarr"), files_of(tmp_path / "r.zarr")
    there = {
        name.removeprefix("states/run/train.zarr/"): files.cat_file(name)
        for name in files.find("states")
    }
    remote = here.pop("remote.json")
    assert here == {
        name: text for name, text in local.items() if "/c." not in name or "rows" in name
    }
    assert there == local | {"remote.json": remote}


def test_a_stopped_run_goes_on_and_makes_only_what_is_missing(files: Any, tmp_path: Path) -> None:
    class Stopping(ToyEngine):
        def states(self, rows: Any) -> Any:
            if any(len(row) == 20 for row in rows):
                raise KeyboardInterrupt
            return super().states(rows)

    with pytest.raises(KeyboardInterrupt):
        write_remote_store(tmp_path / "r.zarr", Stopping())
    done = len(files.glob("states/run/train.zarr/shards/*.json"))
    resumed = write_remote_store(tmp_path / "r.zarr")

    assert 0 < done < resumed.header.num_shards
    write_toy_store(tmp_path / "local.zarr")
    assert resumed.sha256 == StateStore.open(tmp_path / "local.zarr").sha256


@pytest.mark.parametrize("name", ["shards/00001.json", "aux/c.1.0.0", "last/c.1.0"])
def test_a_shard_whose_objects_are_not_all_there_is_made_again(
    files: Any, tmp_path: Path, name: str
) -> None:
    write_remote_store(tmp_path / "r.zarr")
    files.rm(f"states/run/train.zarr/{name}")
    writer = StateWriter(tmp_path / "r.zarr", toy_header(), toy_rows())

    assert writer.done == {0, 2, 3}
    assert write_remote_store(tmp_path / "r.zarr").verify() == []


def test_a_missing_or_short_object_is_named_by_its_url(files: Any, tmp_path: Path) -> None:
    write_remote_store(tmp_path / "r.zarr")
    name = "states/run/train.zarr/aux/c.2.0.0"
    files.pipe_file(name, files.cat_file(name)[:-1])
    with pytest.raises(StoreError, match=r"s3://states/run/train.zarr/aux/c.2.0.0 .* it has \d+ b"):
        StateStore.open(tmp_path / "r.zarr")

    files.rm(name)
    with pytest.raises(StoreError, match=r"aux/c.2.0.0 is damaged: it is missing; run `dvc repro"):
        StateStore.open(tmp_path / "r.zarr")


def test_an_object_that_goes_while_the_store_is_open_is_no_states(
    files: Any, tmp_path: Path
) -> None:
    store = write_remote_store(tmp_path / "r.zarr")
    files.rm("states/run/train.zarr/last/c.3.0")

    with pytest.raises(StoreError, match=r"last/c.3.0 is damaged: it is missing; run `dvc repro"):
        store.read(48, 64)
    [fault] = store.verify()
    assert (fault.shard, fault.file, fault.what) == (3, "last/c.3.0", "missing")


def test_one_flipped_bit_in_an_object_is_found(files: Any, tmp_path: Path) -> None:
    store = write_remote_store(tmp_path / "r.zarr")
    name = "states/run/train.zarr/aux/c.1.0.0"
    content = bytearray(files.cat_file(name))
    content[len(content) // 3] ^= 1
    files.pipe_file(name, bytes(content))

    [fault] = store.verify()
    assert (fault.shard, fault.file) == (1, "aux/c.1.0.0")
    with pytest.raises(StoreError, match=r"damaged: .*run `dvc repro --force extract`"):
        store.read(16, 32)


def test_credentials_are_in_no_file_and_no_log(
    files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_remote_store(tmp_path / "r.zarr").verify()

    kept = [*files_of(tmp_path).values(), *(files.cat_file(name) for name in files.find("states"))]
    for credential in (KEY, SECRET):
        assert not any(credential.encode() in content for content in kept)
        assert credential not in caplog.text


def test_a_bucket_that_is_not_there_says_what_to_set(server: None, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"s3://nowhere/x cannot be used: .*AWS_ENDPOINT_URL"):
        StateWriter(tmp_path / "r.zarr", toy_header(), toy_rows(), url="s3://nowhere/x")


def test_without_s3fs_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)

    with pytest.raises(StoreError, match=r"run `pip install 'eagle3\[s3\]'`, or set extract.store"):
        Bucket("s3://states/x").sizes()
