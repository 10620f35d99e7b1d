"""A store in a bucket: the files and states of one on the disk, whole after any stop."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from s3_server import KEY, SECRET, Requests, TestBucket, files_of, s3_server
from toy_store import toy_header, toy_rows, write_toy_store

from eagle3.errors import StorageError, StoreError
from eagle3.store.bucket import Bucket
from eagle3.store.homes import StoreHomes
from eagle3.store.pointer import POINTER, Pointer
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter

STORE = "run/train.zarr"
URL = f"s3://states/{STORE}"


@pytest.fixture(scope="module")
def server() -> Iterator[TestBucket]:
    with s3_server():
        yield TestBucket()


@pytest.fixture(scope="module")
def put(server: TestBucket) -> list[str]:
    """Names of the toy store's objects, in the order in which they were put; it is at URL."""
    with Requests.listening() as requests:
        write_toy_store(URL)
    return [line.split("/", 2)[2] for line in requests.seen if line.startswith("PUT ")]


@pytest.fixture
def bucket(server: TestBucket, put: list[str]) -> Iterator[TestBucket]:
    """With the whole toy store at URL, before and after each test."""
    yield server
    server.restore()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_toy_store(tmp_path_factory.mktemp("local") / "train.zarr"))


def test_states_are_read_from_a_bucket_as_from_the_disk(bucket: TestBucket, local: Path) -> None:
    here, there = StateStore.open(local), StateStore.open(URL)

    for start, stop in ((0, 64), (5, 40), (63, 64)):
        assert all(map(torch.equal, here.read(start, stop), there.read(start, stop)))
    assert (there.sha256, there.info, there.header) == (here.sha256, here.info, here.header)
    assert there.rows.row_ids == here.rows.row_ids
    assert there.verify() == []


def test_a_bucket_holds_the_files_of_a_folder_and_each_was_put_once(
    bucket: TestBucket, local: Path, put: list[str]
) -> None:
    assert bucket.content(STORE) == files_of(local)
    assert sorted(put) == sorted(files_of(local))


def test_a_run_of_chunks_is_one_request_and_an_index_is_asked_for_once(bucket: TestBucket) -> None:
    store = StateStore.open(URL)
    store.read(16, 17)
    with Requests.listening() as requests:
        # Chunks of 4 tokens; 20 to 31 are three of shard 1.
        store.read(20, 32)

    shards = [f"GET {STORE}/{name}" for name in ("aux/c.1.0.0.0", "last/c.1.0.0")]
    assert sorted(requests.seen) == shards


def test_whatever_was_put_when_a_run_was_killed_it_goes_on_to_the_same_objects(
    bucket: TestBucket, put: list[str], local: Path
) -> None:
    """An object is put whole, so a kill leaves the first so many of them."""
    described = put.index("zarr.json")
    marked = put.index("shards/00001.json")
    for count in (described // 2, described, described + 1, marked - 1, marked, marked + 1):
        for name in put[count:]:
            bucket.change(f"{STORE}/{name}", None)
        writer = StateWriter(URL, toy_header(), toy_rows())
        assert writer.done == {
            shard for shard in (0, 1) if f"shards/{shard:05d}.json" in put[:count]
        }
        write_toy_store(URL)
        assert bucket.content(STORE) == files_of(local), put[count]


def test_a_process_killed_while_it_puts_loses_no_finished_shard(
    bucket: TestBucket, local: Path
) -> None:
    program = (
        "from toy_store import write_toy_store; write_toy_store('s3://states/kill/train.zarr')"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
    for last in ("aux/c.0.0.0.0", "last/c.2.0.0"):
        with Requests.listening() as requests:
            victim = subprocess.Popen([sys.executable, "-c", program], env=environment)
            requests.killed_by[f"PUT kill/train.zarr/{last}"] = victim
            assert victim.wait() == -signal.SIGKILL
    assert {"shards/00000.json", "shards/00001.json"} <= set(bucket.content("kill/train.zarr"))
    assert "shards/00002.json" not in bucket.content("kill/train.zarr")

    with Requests.listening() as requests:
        write_toy_store("s3://states/kill/train.zarr")
    assert bucket.content("kill/train.zarr") == files_of(local)
    again = [line for line in requests.seen if line.startswith("PUT ")]
    assert not any("c.0." in line or "c.1." in line for line in again)


@pytest.mark.parametrize("name", ["shards/00001.json", "aux/c.1.0.0.0", "last/c.1.0.0"])
def test_a_shard_whose_objects_are_not_all_there_is_not_finished(
    bucket: TestBucket, name: str
) -> None:
    bucket.change(f"{STORE}/{name}", None)
    # The writer removes what is left of the shard.
    for other in ("shards/00001.json", "aux/c.1.0.0.0", "last/c.1.0.0"):
        if other != name:
            bucket.change(f"{STORE}/{other}", bucket.content(STORE)[other])

    assert StateWriter(URL, toy_header(), toy_rows()).done == {0, 2, 3}


def test_a_missing_or_short_object_is_named_by_its_url(bucket: TestBucket) -> None:
    name = f"{STORE}/aux/c.2.0.0.0"
    bucket.change(name, b"short")
    with pytest.raises(
        StoreError, match=rf"s3://states/{name} is damaged: it has 5 bytes of \d+; "
    ):
        StateStore.open(URL)

    bucket.change(name, None)
    with pytest.raises(StoreError, match=rf"s3://states/{name} .* missing; run `dvc repro --force"):
        StateStore.open(URL)


def test_what_happens_to_an_object_while_its_store_is_open_is_an_error_and_no_states(
    bucket: TestBucket,
) -> None:
    store, name = StateStore.open(URL), "last/c.3.0.0"
    store.read(48, 64)
    for content in (b"", b"cut off"):
        bucket.change(f"{STORE}/{name}", content)
        with pytest.raises(
            StoreError, match=rf"{name} is damaged: it ends before .*run `dvc repro"
        ):
            store.read(48, 64)

    bucket.change(f"{STORE}/{name}", None)
    with pytest.raises(StoreError, match=rf"{name} is damaged: it is missing; run `dvc repro --f"):
        store.read(48, 64)
    [fault] = store.verify()
    assert (fault.shard, fault.file, fault.what) == (3, name, "it is missing")


def test_one_flipped_bit_of_an_object_is_found(bucket: TestBucket) -> None:
    store = StateStore.open(URL)
    bucket.flip(f"{STORE}/aux/c.1.0.0.0")

    [fault] = store.verify()
    assert (fault.shard, fault.file) == (1, "aux/c.1.0.0.0")
    with pytest.raises(StoreError, match=r"damaged: .*run `dvc repro --force extract`"):
        store.read(16, 32)


def test_work_begun_elsewhere_is_taken_over_but_for_its_damaged_shards(
    bucket: TestBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    homes = StoreHomes(tmp_path, "s3://states/other", {"train.zarr": toy_header()})
    where = homes.start("train.zarr", toy_rows()).where
    write_toy_store(where)
    bucket.flip(f"{where}/last/c.2.0.0".removeprefix("s3://states/"))
    caplog.set_level(logging.INFO)

    assert homes.start("train.zarr", toy_rows()).done == {0, 1, 2, 3}, "its own work it trusts"
    (tmp_path / "train.zarr" / POINTER).unlink()
    assert homes.start("train.zarr", toy_rows()).done == {0, 1, 3}
    assert "has 4 finished shards already: 3 are taken over, 1 are damaged" in caplog.text


def test_other_states_have_another_place(bucket: TestBucket, tmp_path: Path) -> None:
    places = set()
    for header in (toy_header(), toy_header(engine="toy 2.0"), toy_header(dtype="float32")):
        homes = StoreHomes(tmp_path, "s3://states/run", {"train.zarr": header})
        places.add(str(homes.start("train.zarr", toy_rows()).where))

    assert len(places) == 3
    assert all(place.startswith("s3://states/run/train-") for place in places)


def test_a_folder_that_points_to_a_store_opens_that_and_no_other(
    bucket: TestBucket, tmp_path: Path
) -> None:
    there = StateStore.open(URL)
    pointer = Pointer(url=URL, fingerprint=there.header.fingerprint, sha256=there.sha256)
    pointer.save(tmp_path / "train.zarr")

    assert StateStore.open(tmp_path / "train.zarr").sha256 == there.sha256
    pointer.model_copy(update={"sha256": "0" * 64}).save(tmp_path / "train.zarr")
    with pytest.raises(
        StoreError, match=r"other hidden states .*remote.json names .*dvc repro --fo"
    ):
        StateStore.open(tmp_path / "train.zarr")
    pointer.model_copy(update={"url": "s3://states/gone/train.zarr"}).save(tmp_path / "train.zarr")
    with pytest.raises(
        StoreError, match=r"remote.json points .*gone.*; run `dvc repro --force extr"
    ):
        StateStore.open(tmp_path / "train.zarr")
    (tmp_path / "train.zarr" / POINTER).write_text("{")
    with pytest.raises(
        StoreError, match=r"remote.json names no store; run `dvc repro --force extr"
    ):
        StateStore.open(tmp_path / "train.zarr")


def test_credentials_are_in_no_object_no_file_and_no_log(
    bucket: TestBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "eagle3")
    homes = StoreHomes(tmp_path, "s3://states/credentials", {"train.zarr": toy_header()})
    homes.require_room()
    write_toy_store(homes.start("train.zarr", toy_rows()).where)
    homes.finish("train.zarr").verify()

    kept = [*files_of(tmp_path).values(), *bucket.content("credentials").values()]
    assert len(kept) > 20
    for credential in (KEY, SECRET):
        assert not any(credential.encode() in content for content in kept)
        assert credential not in caplog.text


def test_a_bucket_that_is_not_there_is_named_with_what_makes_it(server: TestBucket) -> None:
    with pytest.raises(
        StorageError, match=r"s3://nowhere/x .*no bucket nowhere; make it .*extract"
    ):
        StateWriter("s3://nowhere/x", toy_header(), toy_rows())
    with pytest.raises(
        StorageError, match=r"s3://nowhere/x .*no bucket nowhere; make it .*extract"
    ):
        StateStore.open("s3://nowhere/x")


@pytest.mark.parametrize("kept", ["AWS_NOTHING", "AWS_ACCESS_KEY_ID"])
def test_without_credentials_or_with_half_of_them_their_variables_are_named(
    server: TestBucket, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    for name in {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} - {kept}:
        monkeypatch.delenv(name)

    with pytest.raises(
        StorageError, match=r"s3://states/x .*; give credentials by AWS_ACCESS_KEY_"
    ):
        StateStore.open("s3://states/x")


def test_without_a_server_its_variable_is_named(
    server: TestBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    with pytest.raises(StorageError, match=r"s3://states/x cannot be reached: .*AWS_ENDPOINT_URL"):
        StateStore.open("s3://states/x")


def test_without_s3fs_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)

    with pytest.raises(StorageError, match=r"run `pip install 'eagle3\[s3\]'`, or set extract.sto"):
        Bucket("s3://states/x")


def test_a_url_without_a_prefix_is_no_store(server: TestBucket) -> None:
    with pytest.raises(StorageError, match=r"s3://states names no store; write s3://BUCKET/PREFIX"):
        StateStore.open("s3://states")
