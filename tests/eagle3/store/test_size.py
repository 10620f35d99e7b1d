"""What a store will take is said before it is written, and a full disk costs no finished shard."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import full_disk
import pytest
from toy_store import toy_header, write_toy_store

from eagle3.errors import DiskFullError
from eagle3.store.layout import marker_name
from eagle3.store.size import EXPECTED_RATIO, StoreSizes, expected_bytes

# A mount namespace of its own: what is mounted there is seen by nobody else and ends with it.
PRIVATE = ["unshare", "--map-root-user", "--mount", "--user"]


def test_a_store_that_is_not_there_is_still_to_come_as_a_whole(tmp_path: Path) -> None:
    header = toy_header(dtype="float8")
    sizes = StoreSizes(tmp_path, {"train.zarr": header, "eval.zarr": header})

    assert sizes.tokens == 128
    assert sizes.raw_bytes == 2 * 64 * 4 * 4 * 2
    assert sizes.to_come() == 2 * expected_bytes(header)
    assert expected_bytes(header) == round(64 * 4 * 4 * 2 * EXPECTED_RATIO["float8"])


def test_finished_shards_are_not_to_come(tmp_path: Path) -> None:
    write_toy_store(tmp_path / "train.zarr")
    sizes = StoreSizes(tmp_path, {"train.zarr": toy_header()})
    assert sizes.to_come() == 0

    (tmp_path / "train.zarr" / marker_name(2)).unlink()
    assert sizes.to_come() == round(expected_bytes(toy_header()) / 4)


def test_the_estimate_is_logged_with_the_room_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        StoreSizes(tmp_path, {"train.zarr": toy_header(hidden_size=1 << 16)}).require_room()

    assert "of 64 tokens: 32.0 MiB as they are, about 22.4 MiB at rest" in caplog.text
    assert "MiB free" in caplog.text


def test_a_disk_that_is_too_small_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    # A petabyte: no disk of a test machine has it.
    header = toy_header(hidden_size=1 << 42)

    with pytest.raises(
        DiskFullError, match=r"which has [\d,.]+ MiB free: [\d,.]+ MiB are missing; make room, or"
    ):
        StoreSizes(tmp_path, {"train.zarr": header}).require_room()


@pytest.fixture
def private_mounts(tmp_path: Path) -> list[str]:
    """A command prefix under which a tmpfs can be mounted."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (Linux) for a small file system")
    place = tmp_path / "probe"
    place.mkdir()
    probe = [*PRIVATE, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    found = subprocess.run(probe, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"cannot mount a small file system here: {found.stderr.strip()}")
    place.rmdir()
    return PRIVATE


def test_extraction_on_a_full_disk_says_what_is_missing_and_goes_on_to_the_same_bytes(
    private_mounts: list[str], tmp_path: Path
) -> None:
    program = Path(full_disk.__file__)
    root = program.parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{program.parent}"}
    done = subprocess.run(
        [*private_mounts, sys.executable, str(program), str(tmp_path), "12", "36"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    stops = json.loads(done.stdout.splitlines()[-1])
    shards = {stop["shards"] for stop in stops}
    assert min(shards) == 0, "before the first shard"
    assert len(shards) > 3, "and between several"
    for stop in stops:
        assert stop["equal"], stop
        assert "make room, then run the same command again" in stop["message"], stop
        assert "MiB more" in stop["message"], stop
        assert stop["left"] == [".work", "data", "hidden_states"], stop
