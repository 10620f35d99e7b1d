"""Which shards training needs, and for how long."""

from eagle3.config import Params, TrainParams
from eagle3.stream_plan import ShardNeeds, first_epoch, most_at_once, rows_to_read

LENGTHS = [5, 9, 6, 20, 3, 11, 2, 8]


def options(params: Params, **changes: object) -> TrainParams:
    return params.train.model_copy(update={"batch_tokens": 16, "accumulate": 2, **changes})


def test_the_first_epoch_has_every_row_in_the_order_of_the_steps(tiny_params: Params) -> None:
    params = options(tiny_params, total_steps=50)
    order = first_epoch(LENGTHS, params)

    assert sorted(order) == list(range(8))
    assert list(rows_to_read(LENGTHS, params, 0))[:8] == order


def test_what_is_left_to_read_at_a_step_is_the_end_of_the_whole(tiny_params: Params) -> None:
    params = options(tiny_params, total_steps=9)
    whole = list(rows_to_read(LENGTHS, params, 0))
    left = list(rows_to_read(LENGTHS, params, 6))

    assert 0 < len(left) < len(whole)
    assert whole[-len(left) :] == left
    assert list(rows_to_read(LENGTHS, params, 9)) == []


def test_a_shard_is_no_longer_needed_after_the_last_row_that_lies_in_it() -> None:
    needs = ShardNeeds([range(2, 4), range(0, 1), range(2, 3), range(3, 4)])

    assert needs.order == (2, 3, 0)
    assert needs.turn(range(2, 4)) == 1
    assert [needs.read(shards) for shards in (range(2, 4), range(0, 1), range(2, 3))] == [
        [],
        [0],
        [2],
    ]


def test_one_epoch_keeps_as_many_shards_as_the_target_is_ahead_and_the_one_being_read() -> None:
    one_epoch = [range(shard, shard + 1) for shard in range(10) for _ in range(3)]

    assert most_at_once(one_epoch, ahead=2, there=set()) == 3
    assert most_at_once(one_epoch, ahead=20, there=set()) == 10


def test_a_row_across_shards_needs_one_more() -> None:
    across = [range(shard, shard + 2) for shard in range(9)]

    assert most_at_once(across, ahead=1, there=set()) == 3


def test_a_second_epoch_keeps_all_shards() -> None:
    epoch = [range(shard, shard + 1) for shard in range(6)]

    assert most_at_once(epoch + epoch, ahead=1, there=set()) == 6


def test_shards_that_an_earlier_run_left_count_from_the_start() -> None:
    one_epoch = [range(shard, shard + 1) for shard in range(10)]

    assert most_at_once(one_epoch, ahead=1, there={3, 4, 8, 9}) == 6
    assert most_at_once(one_epoch[5:], ahead=1, there={0, 1, 2}) == 2
