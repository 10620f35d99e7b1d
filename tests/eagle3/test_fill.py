"""Shards are written while the target makes the next one, and whatever fails, none is left half."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from toy_store import Silent, ToyEngine, toy_header, toy_rows
from watched import CALLS_OF_SHARD_0, PATIENCE, WatchedEngine, WatchedWriter

from eagle3.engines.base import RowStates
from eagle3.errors import StoreError
from eagle3.fill import TokenProgress, calls, fill
from eagle3.refusals import Refusals
from eagle3.store.writer import StateWriter

ROWS = toy_rows()


def run(writer: StateWriter, engine: ToyEngine) -> None:
    fill(writer, engine, "train", TokenProgress(Silent(), ROWS.num_tokens), Refusals(0))


def test_the_target_makes_the_next_shard_while_one_is_written(tmp_path: Path) -> None:
    target_goes_on = threading.Event()

    def wait_for_the_target(shard: int) -> None:
        assert shard or target_goes_on.wait(PATIENCE), "the target waits for the writer"

    def tell(call: int) -> None:
        if call > CALLS_OF_SHARD_0:
            target_goes_on.set()

    writer = WatchedWriter(tmp_path / "train.zarr", wait_for_the_target)
    run(writer, WatchedEngine(tell))

    assert writer.done == {0, 1, 2, 3}


def test_the_target_is_asked_again_while_what_it_gave_is_put_into_a_shard(tmp_path: Path) -> None:
    asked_again = [threading.Event() for _ in range(40)]

    class Awaited(list[RowStates]):
        """States that are not read before the target is asked for the next ones."""

        def __init__(self, states: Iterable[RowStates], call: int) -> None:
            super().__init__(states)
            self.call = call

        def __iter__(self) -> Iterator[RowStates]:
            # The last rows lie in the last shard, and nothing is asked for after them.
            assert self.call == last or asked_again[self.call + 1].wait(PATIENCE)
            return super().__iter__()

    class Asked(WatchedEngine):
        def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
            return Awaited(super().states(rows), self.calls)

    last = sum(1 for _ in calls(ROWS, toy_header().shard_tokens))
    writer = WatchedWriter(tmp_path / "train.zarr", lambda shard: None)
    run(writer, Asked(lambda call: asked_again[call].set()))

    assert writer.done == {0, 1, 2, 3}


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_an_error_of_the_writer_ends_the_work_and_the_next_run_goes_on(
    tmp_path: Path, broken: int
) -> None:
    def break_at(shard: int) -> None:
        if shard == broken:
            raise StoreError(f"shard {shard} cannot be written")

    writer = WatchedWriter(tmp_path / "train.zarr", break_at)
    with pytest.raises(StoreError, match=f"shard {broken} cannot be written"):
        run(writer, ToyEngine())
    assert writer.done == set(range(broken))

    writer.before = lambda shard: None
    run(writer, ToyEngine())
    assert writer.done == {0, 1, 2, 3}


def test_an_error_of_the_target_leaves_the_shard_under_way_whole(tmp_path: Path) -> None:
    writing, target_broke = threading.Event(), threading.Event()

    def break_down(call: int) -> None:
        if call > CALLS_OF_SHARD_0:
            assert writing.wait(PATIENCE), "nothing is written"
            target_broke.set()
            raise ValueError("the target broke")

    def wait_for_the_break(shard: int) -> None:
        writing.set()
        assert target_broke.wait(PATIENCE), "the target was not asked for more"

    writer = WatchedWriter(tmp_path / "train.zarr", wait_for_the_break)
    with pytest.raises(ValueError, match="the target broke"):
        run(writer, WatchedEngine(break_down))

    assert writer.done == {0}
