"""Every shard goes to one worker, neighbours together, and none is lost with a worker."""

import pytest

from eagle3.shard_plan import Shard, ShardPlan

SHARDS: list[Shard] = [("train", number) for number in range(7)] + [("eval", 0)]


def take_turns(plan: ShardPlan, workers: int) -> list[list[Shard]]:
    """What each worker gets when all are equally fast."""
    taken: list[list[Shard]] = [[] for _ in range(workers)]
    while plan.left:
        for worker in range(workers):
            if shard := plan.next(worker):
                taken[worker].append(shard)
    return taken


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 11])
def test_every_shard_is_given_once(workers: int) -> None:
    taken = take_turns(ShardPlan(SHARDS, workers), workers)

    assert sorted(shard for each in taken for shard in each) == sorted(SHARDS)


def test_equally_fast_workers_get_neighbours() -> None:
    assert take_turns(ShardPlan(SHARDS, 2), 2) == [SHARDS[:4], SHARDS[4:]]


def test_a_worker_that_is_through_takes_the_later_half_of_what_another_has_left() -> None:
    plan = ShardPlan(SHARDS, 2)
    assert plan.next(1) == SHARDS[4]
    assert [plan.next(0) for _ in range(4)] == SHARDS[:4]

    # Worker 1 is at shard 4 and has 5, 6 and 7 left.
    assert plan.next(0) == SHARDS[6]
    assert [plan.next(1), plan.next(0), plan.next(1)] == [SHARDS[5], SHARDS[7], None]


def test_what_a_dead_worker_had_goes_to_the_others() -> None:
    plan = ShardPlan(SHARDS, 2)
    lost = plan.next(1)
    assert lost == SHARDS[4]
    plan.give_back(1, lost)

    assert sorted(shard for _ in SHARDS if (shard := plan.next(0))) == sorted(SHARDS)
    assert plan.left == 0


def test_nothing_is_handed_out_of_an_empty_plan() -> None:
    assert ShardPlan([], 2).next(1) is None
