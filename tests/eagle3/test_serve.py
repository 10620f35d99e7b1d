import numpy as np

from eagle3.serve import eval_turns
from eagle3.store.rows import Rows


def rows() -> Rows:
    """Three rows: two turns of chat, one turn of chat, one of code."""
    spans = [[0, 0, 1, 1, 0, 1], [0, 1, 1], [0, 0, 1]]
    mask = np.concatenate(spans).astype(bool)
    return Rows(
        tokens_N=np.arange(100, 112, dtype=np.int32),
        loss_mask_N=mask,
        offsets_R1=np.cumsum([0, *map(len, spans)]).astype(np.int64),
        domains=("chat", "chat", "code"),
        row_ids=("a", "b", "c"),
    )


def test_every_answer_of_a_row_is_asked_for_with_all_that_stands_before_it():
    first, second, *_ = eval_turns(rows(), per_domain=1)

    assert (first.prompt, first.stored) == ([100, 101], [102, 103])
    assert (second.prompt, second.stored) == ([100, 101, 102, 103, 104], [105])


def test_an_answer_is_as_long_as_it_is_stored():
    assert [turn.limit for turn in eval_turns(rows(), per_domain=2)] == [2, 1, 2, 1]


def test_each_domain_gives_as_many_rows():
    turns = eval_turns(rows(), per_domain=1)

    assert [(turn.domain, turn.row) for turn in turns] == [("chat", 0), ("chat", 0), ("code", 2)]
