"""A store read by other processes: the same states, the same faults, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from toy_store import write_toy_store

from eagle3.errors import StoreError
from eagle3.reader_processes import ReaderProcesses, shares
from eagle3.store.states import StateStore

SPANS = [slice(40, 64), slice(15, 17), slice(0, 33), slice(15, 17)]

READ_FOR_EVER = """
import sys, time
from eagle3.reader_processes import ReaderProcesses
if __name__ == "__main__":
    readers = ReaderProcesses(sys.argv[1], 1)
    readers.read_spans([slice(0, 4)])
    (pid,) = readers._pool._processes
    print(pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "train.zarr"
    write_toy_store(path)
    return path


@pytest.fixture(scope="module")
def readers(path: Path) -> Iterator[ReaderProcesses]:
    with ReaderProcesses(path, 2) as readers:
        yield readers


def test_they_read_what_one_process_reads(path: Path, readers: ReaderProcesses) -> None:
    store = StateStore.open(path)

    for spans in (SPANS, SPANS[:1], [slice(7, 8)]):
        for found, expected in zip(readers.read_spans(spans), store.read_spans(spans), strict=True):
            assert torch.equal(found, expected)


def test_every_process_gets_an_equal_share_in_order() -> None:
    parts = shares(SPANS, 3)
    tokens = [[token for span in part for token in range(span.start, span.stop)] for part in parts]

    assert [len(part) for part in tokens] == [21, 21, 19]
    in_order = [token for span in SPANS for token in range(span.start, span.stop)]
    assert list(chain.from_iterable(tokens)) == in_order
    assert shares([slice(3, 5)], 4) == [[slice(3, 4)], [slice(4, 5)]]


def test_a_damaged_shard_is_named_as_it_is_without_them(tmp_path: Path) -> None:
    write_toy_store(tmp_path / "train.zarr")
    shard = next((tmp_path / "train.zarr" / "aux").glob("c.0.*"))
    shard.write_bytes(bytes(shard.stat().st_size))

    with (
        ReaderProcesses(tmp_path / "train.zarr", 1) as readers,
        pytest.raises(StoreError, match=str(shard)),
    ):
        readers.read_spans([slice(0, 4)])


def test_a_killed_reader_ends_the_reading_with_what_to_do(path: Path) -> None:
    with ReaderProcesses(path, 1) as readers:
        readers.read_spans([slice(0, 4)])
        (pid,) = readers._pool._processes
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(StoreError, match=r"--shm-size.*train\.reader_processes to 0"):
            read_for_ever(readers)


def test_they_end_with_a_killed_trainer(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(READ_FOR_EVER)
    with subprocess.Popen(
        [sys.executable, script, path], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        reader = int(trainer.stdout.readline())
        trainer.kill()

    while running(reader):
        time.sleep(0.05)


def read_for_ever(readers: ReaderProcesses) -> None:
    """Until it fails: a process that was killed a moment ago may have given its answer before."""
    while True:
        readers.read_spans(SPANS)


def running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
