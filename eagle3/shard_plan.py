"""Who makes which shard: a run of neighbours for each worker, and a share of what others have left.

Neighbours, since a row that lies across two shards is then run once for both.
"""

from collections import deque
from collections.abc import Sequence

from eagle3.artifacts import Split

Shard = tuple[Split, int]
"""A shard by the split of its store and its number there."""


class ShardPlan:
    """Shards that nobody has begun. No shard is with two workers."""

    def __init__(self, shards: Sequence[Shard], workers: int) -> None:
        each, more = divmod(len(shards), workers)
        starts = [worker * each + min(worker, more) for worker in range(workers + 1)]
        self._runs = [deque(shards[starts[i] : starts[i + 1]]) for i in range(workers)]

    @property
    def left(self) -> int:
        """Shards that nobody has begun."""
        return sum(map(len, self._runs))

    def next(self, worker: int) -> Shard | None:
        """The next shard of a worker; None when all are with others."""
        run = self._runs[worker]
        if not run:
            # The later half of the longest run: its start is beside what its owner is at.
            longest = max(self._runs, key=len)
            taken = [longest.pop() for _ in range(-(-len(longest) // 2))]
            run.extend(reversed(taken))
        return run.popleft() if run else None

    def give_back(self, worker: int, shard: Shard) -> None:
        """A worker did not finish its shard: somebody will, before the rest of its run."""
        self._runs[worker].appendleft(shard)
