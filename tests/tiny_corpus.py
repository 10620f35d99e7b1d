"""A corpus of made-up token ids, for tests that need rows of given lengths and no text."""

from collections.abc import Mapping, Sequence

import numpy as np

from eagle3.artifacts import Corpus, Split, TargetModel
from eagle3.store.rows import Rows, rows_sha256, save_rows


def rows_of(lengths: Sequence[int]) -> Rows:
    """Rows of these lengths, of ids from 3 to 302."""
    count = sum(lengths)
    return Rows(
        tokens_N=(np.arange(count) * 7 % 300 + 3).astype(np.int32),
        loss_mask_N=np.ones(count, np.bool_),
        offsets_R1=np.cumsum([0, *lengths], dtype=np.int64),
        domains=("chat",) * len(lengths),
        row_ids=tuple(f"row{number}" for number in range(len(lengths))),
    )


def save_corpus(target: TargetModel, lengths: Mapping[Split, Sequence[int]]) -> Corpus:
    """Write such rows where the corpus lies; its record is not saved."""
    rows = {split: rows_of(each) for split, each in lengths.items()}
    for split, each in rows.items():
        save_rows(each, Corpus.home / f"{split}.zarr")
    return Corpus(
        made_from={"target": target.fingerprint},
        tokens={split: each.num_tokens for split, each in rows.items()},
        supervised_tokens={split: each.num_tokens for split, each in rows.items()},
        rows={split: len(each) for split, each in rows.items()},
        sha256={split: rows_sha256(each) for split, each in rows.items()},
        counts={},
    )
