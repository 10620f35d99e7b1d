"""What the store adds to a target that leaves this machine's processor alone, as a GPU's does.

    python benchmarks/extract_overlap.py --store PROJECT/data/hidden_states/train.zarr

**The target is simulated**: it waits as long as a target of the given speed would compute, and
gives the states that it has read from the store. Timed in turn: the calls alone, and the filling of
a store by the same calls. `overhead` is the second over the first, less one, of the medians.

With `--workers 2`, workers on Ray with such targets fill the store, told one shard at a time and
two in turn. Their time is held against that of all calls shared out evenly.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from store_results import keep

from eagle3 import ray_workers
from eagle3.engines.base import RowStates
from eagle3.fill import TokenProgress, calls, fill
from eagle3.progress import ConsoleReporter
from eagle3.ray_worker import ExtractWorker, OneRowAgain, WorkerFacts, WorkerJob
from eagle3.refusals import Refusals
from eagle3.shard_maker import ShardMaker
from eagle3.store.rows import Rows
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter


class WaitingEngine:
    """Stored states, at the speed of a target."""

    name = "simulated"

    def __init__(self, store: StateStore, rows: Rows, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._states = {
            tuple(rows.tokens_N[rows.span(row)].tolist()): RowStates(*store.read(*_ends(rows, row)))
            for row in range(len(rows))
        }

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """After the time that they would take."""
        time.sleep(sum(map(len, rows)) / self._tokens_per_s)
        return [self._states[tuple(row)] for row in rows]


def _ends(rows: Rows, row: int) -> tuple[int, int]:
    span = rows.span(row)
    return span.start, span.stop


def measure(store: StateStore, rows: Rows, args: argparse.Namespace, pace: float) -> dict[str, Any]:
    """Seconds of the calls alone and of filling, in turn."""
    engine = WaitingEngine(store, rows, pace)
    header = store.header.model_copy(update={"shard_tokens": args.shard_tokens})
    alone, filling = [], []
    for _ in range(args.repeats):
        started = time.perf_counter()
        for call in calls(rows, header.shard_tokens):
            engine.states([rows.tokens_N[rows.span(row)].tolist() for row in call])
        alone.append(time.perf_counter() - started)
        with TemporaryDirectory(prefix="extract-overlap-", dir=args.folder) as folder:
            writer = StateWriter(Path(folder) / "train.zarr", header, rows)
            progress = TokenProgress(ConsoleReporter(), rows.num_tokens)
            started = time.perf_counter()
            fill(writer, engine, "train", progress, Refusals(0))
            filling.append(time.perf_counter() - started)
    middle, middle_alone = statistics.median(filling), statistics.median(alone)
    return {
        "tokens_per_s": pace,
        "seconds_target_alone": round(middle_alone, 3),
        "seconds_filling": round(middle, 3),
        "overhead": round(middle / middle_alone - 1, 3),
    }


def measure_workers(
    store: StateStore, rows: Rows, args: argparse.Namespace, pace: float
) -> dict[str, Any]:
    """Seconds of filling by workers, with one and with two shards at a time, in turn."""
    header = store.header.model_copy(update={"shard_tokens": args.shard_tokens})
    path = args.store.resolve()

    class WaitingWorker(ExtractWorker):
        def open(self, job: WorkerJob) -> WorkerFacts:
            there = StateStore.open(path)
            engine: Any = WaitingEngine(there, there.rows, pace)
            self._maker = ShardMaker(OneRowAgain(engine), job.threads)
            return WorkerFacts(engine.name, "here", 0)

    ray_workers.ExtractWorker = WaitingWorker
    job: Any = argparse.Namespace(threads=1)
    filling: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.repeats):
        for at_once, seconds in filling.items():
            ray_workers.SHARDS_AT_ONCE = at_once
            with (
                TemporaryDirectory(prefix="extract-overlap-", dir=args.folder) as folder,
                ray_workers.ray_workers(job, args.workers, None, "cpu") as workers,
            ):
                while len(workers._ready) < args.workers:
                    workers._collect(ray_workers.ShardPlan([], args.workers))
                writer = StateWriter(Path(folder).resolve() / "train.zarr", header, rows)
                progress = TokenProgress(ConsoleReporter(), rows.num_tokens)
                started = time.perf_counter()
                workers.fill({"train": writer}, progress, Refusals(0))
                seconds.append(time.perf_counter() - started)
    alone = rows.num_tokens / pace / args.workers
    middles = {at_once: statistics.median(seconds) for at_once, seconds in filling.items()}
    return {
        "tokens_per_s": pace,
        "seconds_targets_alone": round(alone, 3),
        "seconds_filling_by_shards_at_once": {
            key: round(middle, 3) for key, middle in middles.items()
        },
        "overhead_by_shards_at_once": {
            key: round(middle / alone - 1, 3) for key, middle in middles.items()
        },
    }


def main() -> None:
    """Measure each speed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="hidden states of a finished run")
    parser.add_argument("--tokens-per-s", type=float, nargs="+", default=[10e3, 20e3, 40e3])
    parser.add_argument("--shard-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="on Ray; 0: this process")
    parser.add_argument("--folder", type=Path, help="where stores are written; it must exist")
    args = parser.parse_args()
    store = StateStore.open(args.store)
    rows = store.rows
    facts = {
        "target": "simulated",
        "tokens": rows.num_tokens,
        "bytes_per_token": store.header.raw_bytes // store.header.tokens,
        "shard_tokens": args.shard_tokens,
        "speeds": [
            (measure_workers if args.workers else measure)(store, rows, args, pace)
            for pace in args.tokens_per_s
        ],
    }
    by = f", {args.workers} workers on Ray" if args.workers else ""
    keep("extract_overlap", f"states of width {store.header.hidden_size}{by}", facts)


if __name__ == "__main__":
    main()
