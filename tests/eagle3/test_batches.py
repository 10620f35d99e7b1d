"""The order in which rows are fed to training."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from eagle3.batches import packed_rows, read_batch
from eagle3.store.refused import RowsRead, zeros_for_refused
from eagle3.store.rows import Rows


def some_rows() -> Rows:
    return Rows(
        tokens_N=np.arange(9, dtype=np.int32),
        loss_mask_N=np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=bool),
        offsets_R1=np.array([0, 3, 5, 9], dtype=np.int64),
        domains=("a", "a", "b"),
        row_ids=("x", "y", "z"),
    )


def test_every_row_comes_once_an_epoch_whole_and_within_the_batch() -> None:
    lengths = [5, 7, 3, 8, 2, 6]
    taken: list[int] = []
    for batch in islice(packed_rows(lengths, batch_tokens=12, seed=0), 60):
        assert sum(lengths[row] for row in batch) <= 12
        taken += batch

    for epoch in range(10):
        assert sorted(taken[6 * epoch : 6 * epoch + 6]) == [0, 1, 2, 3, 4, 5]


def test_a_row_longer_than_the_batch_is_a_batch_alone() -> None:
    batches = list(islice(packed_rows([50, 1], batch_tokens=10, seed=0), 4))

    assert (0,) in batches
    assert all(0 not in batch or len(batch) == 1 for batch in batches)


def test_the_order_depends_on_the_seed_alone() -> None:
    first = list(islice(packed_rows([3] * 20, 9, seed=1), 40))

    assert first == list(islice(packed_rows([3] * 20, 9, seed=1), 40))
    assert first != list(islice(packed_rows([3] * 20, 9, seed=2), 40))


def test_rows_are_laid_end_to_end_with_their_own_states() -> None:
    rows = some_rows()
    aux = torch.arange(9.0)[:, None, None].expand(9, 3, 4)
    last = torch.arange(9.0)[:, None].expand(9, 4) * 10

    def read(spans: Sequence[slice]) -> RowsRead:
        found = [(aux[span], last[span]) for span in spans]
        return zeros_for_refused(spans, found, 4, torch.float32)

    batch = read_batch(rows, read, (2, 0), torch.device("cpu"))

    assert batch.tokens_N.tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert batch.loss_mask_N.tolist() == [False, False, True, True, False, True, True]
    assert batch.aux_N3H[:, 0, 0].tolist() == batch.tokens_N.tolist()
    assert batch.last_NH[:, 0].tolist() == [10 * token for token in batch.tokens_N.tolist()]
    assert batch.documents.bounds == (0, 4, 7)
