"""A target and a disk that work side by side for callers who are told shard by shard.

`eagle3.fill.fill_shards` knows which shard follows, and makes it while one is written. Here each
call is one shard and ends when that is durable, so it takes a second call beside it.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from eagle3.artifacts import Split
from eagle3.engines.base import StatesEngine
from eagle3.fill import Filling, TokenProgress, make_shards
from eagle3.progress import SilentReporter
from eagle3.refusals import Refusals
from eagle3.store.writer import StateWriter

SHARDS_AT_ONCE = 2
"""Calls that keep both at work. Each holds a shard in memory, so more would only cost room."""


class ShardMaker:
    """Makes one shard at a time, and writes one at a time. Threads may share it."""

    def __init__(self, engine: StatesEngine, threads: int) -> None:
        """`threads` are what torch computes with."""
        self._engine = engine
        # Whoever calls, the target has one thread: torch's number of threads is that of a thread.
        self._target = ThreadPoolExecutor(1, "make-shard", torch.set_num_threads, (threads,))
        self._disk = ThreadPoolExecutor(1, "write-shard")

    def fill(self, writer: StateWriter, split: Split, shard: int, limit: int) -> None:
        """Make a shard that is not done, which may have been begun; it is durable afterwards.

        `limit` is extract.max_nonfinite_rows.

        Raises:
            StoreError: more rows of this shard have a state that is no number; it is not written.
        """
        filled = self._target.submit(self._make, writer, split, shard, limit).result()
        given = (filled.aux_n3H, filled.last_nH, filled.refused)
        self._disk.submit(writer.write, shard, *given).result()

    def _make(self, writer: StateWriter, split: Split, shard: int, limit: int) -> Filling:
        writer.clear(shard)
        silent = TokenProgress(SilentReporter(), 0)
        made: dict[int, Filling] = {}
        make_shards(writer, self._engine, silent, {shard}, made.__setitem__)
        filled = made[shard]
        Refusals(limit).add(split, filled.refused)
        return filled
