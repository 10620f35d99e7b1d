"""What training still has to read of the train split, shard by shard.

Which shards are needed, in which order, and after which row the last need of one is over: all of it
follows from step and params, and nothing from time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import chain, islice

from eagle3.batches import packed_rows
from eagle3.config import TrainParams


def first_epoch(lengths: Sequence[int], params: TrainParams) -> list[int]:
    """Row numbers in the order in which the first epoch reads them: every row once."""
    batches = packed_rows(lengths, params.batch_tokens, params.seed)
    return list(islice(chain.from_iterable(batches), len(lengths)))


def rows_to_read(lengths: Sequence[int], params: TrainParams, step: int) -> Iterable[int]:
    """Row numbers that the steps from `step` to the last read, one by one; rows come again."""
    batches = packed_rows(lengths, params.batch_tokens, params.seed)
    first, behind = step * params.accumulate, params.total_steps * params.accumulate
    return chain.from_iterable(islice(batches, first, behind))


class ShardNeeds:
    """How often each shard will still be read."""

    def __init__(self, reads: Iterable[range]) -> None:
        """`reads` has the shards of each row, in the order of reading."""
        self._left: Counter[int] = Counter()
        for shards in reads:
            self._left.update(shards)
        self.order = tuple(self._left)
        """Shards by their first reading."""
        self._turns = {shard: turn for turn, shard in enumerate(self.order)}

    def turn(self, shards: range) -> int:
        """The place in the order of the last of these shards."""
        return max(self._turns[shard] for shard in shards)

    def read(self, shards: range) -> list[int]:
        """Count a row as read; the shards of it that no later row needs."""
        self._left.subtract(shards)
        return [shard for shard in shards if not self._left[shard]]


def most_at_once(reads: Sequence[range], ahead: int, there: Set[int]) -> int:
    """Shards on disk at the fullest moment, if the target keeps `ahead` shards before training.

    `there` are on disk at the start.
    """
    needs = ShardNeeds(reads)
    present, made = set(there) & set(needs.order), 0
    most = len(present)
    for shards in reads:
        allowed = min(needs.turn(shards) + ahead + 1, len(needs.order))
        if allowed > made:
            present.update(needs.order[made:allowed])
            made = allowed
        most = max(most, len(present))
        present.difference_update(needs.read(shards))
    return most
