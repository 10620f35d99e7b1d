"""Two callers at once keep target and disk at work, and a call ends when its shard is durable."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from toy_store import ToyEngine, write_toy_store
from watched import CALLS_OF_SHARD_0, PATIENCE, WatchedEngine, WatchedWriter

from eagle3.engines.base import RowStates, StatesEngine
from eagle3.errors import StoreError
from eagle3.shard_maker import SHARDS_AT_ONCE, ShardMaker
from eagle3.store.writer import StateWriter


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        yield pool


class Worker:
    """A maker and the callers that it has."""

    def __init__(
        self, callers: ThreadPoolExecutor, writer: StateWriter, engine: StatesEngine
    ) -> None:
        self.callers, self.writer = callers, writer
        self.maker = ShardMaker(engine, torch.get_num_threads())

    def fill(self, shard: int) -> Future[None]:
        return self.callers.submit(self.maker.fill, self.writer, "train", shard, 0)


def test_the_target_makes_one_shard_while_another_is_written_and_no_call_ends_before_its_own_is(
    tmp_path: Path, callers: ThreadPoolExecutor
) -> None:
    writing, target_goes_on = threading.Event(), threading.Event()

    def tell(call: int) -> None:
        if call > CALLS_OF_SHARD_0:
            target_goes_on.set()

    def wait_for_the_target(shard: int) -> None:
        if shard == 0:
            writing.set()
            assert target_goes_on.wait(PATIENCE), "the target waits for the writer"
            assert not first.done(), "a shard that is not written counts as done"

    writer = WatchedWriter(tmp_path / "train.zarr", wait_for_the_target)
    worker = Worker(callers, writer, WatchedEngine(tell))
    first = worker.fill(0)
    assert writing.wait(PATIENCE), "nothing is written"
    second = worker.fill(1)
    first.result()
    assert 0 in writer.done
    second.result()
    assert writer.done == {0, 1}


def test_shards_made_side_by_side_have_the_bytes_of_one_after_the_other(
    tmp_path: Path, callers: ThreadPoolExecutor
) -> None:
    writer = WatchedWriter(tmp_path / "train.zarr", lambda shard: None)
    worker = Worker(callers, writer, ToyEngine())
    for call in [worker.fill(shard) for shard in range(writer.header.num_shards)]:
        call.result()
    write_toy_store(tmp_path / "alone.zarr")

    for path in (tmp_path / "alone.zarr").rglob("*"):
        if path.is_file():
            same = tmp_path / "train.zarr" / path.relative_to(tmp_path / "alone.zarr")
            assert same.read_bytes() == path.read_bytes(), path


def test_an_error_of_the_writer_ends_the_call_of_its_shard_and_no_other(
    tmp_path: Path, callers: ThreadPoolExecutor
) -> None:
    second_is_made = threading.Event()

    def break_the_first(shard: int) -> None:
        if shard == 0:
            assert second_is_made.wait(PATIENCE), "the target waits for the writer"
            raise StoreError(f"shard {shard} cannot be written")

    def tell(call: int) -> None:
        if call > CALLS_OF_SHARD_0:
            second_is_made.set()

    writer = WatchedWriter(tmp_path / "train.zarr", break_the_first)
    worker = Worker(callers, writer, WatchedEngine(tell))
    first, second = worker.fill(0), worker.fill(1)

    with pytest.raises(StoreError, match="shard 0 cannot be written"):
        first.result()
    second.result()
    assert writer.done == {1}
    writer.before = lambda shard: None
    worker.fill(0).result()
    assert writer.done == {0, 1}


def test_whoever_calls_the_target_computes_in_one_thread_with_the_threads_it_was_given(
    tmp_path: Path, callers: ThreadPoolExecutor
) -> None:
    found = set()

    class Looks(ToyEngine):
        def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
            found.add((threading.current_thread().name, torch.get_num_threads()))
            return super().states(rows)

    ours = torch.get_num_threads()
    writer = WatchedWriter(tmp_path / "train.zarr", lambda shard: None)
    maker = ShardMaker(Looks(), ours + 1)
    try:
        calls = [callers.submit(maker.fill, writer, "train", shard, 0) for shard in range(4)]
        for call in calls:
            call.result()
    finally:
        torch.set_num_threads(ours)

    assert found == {("make-shard_0", ours + 1)}
