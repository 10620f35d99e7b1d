"""What the stages before have made of one split."""

from eagle3.artifacts import Corpus, HiddenStates, Split
from eagle3.store.rows import Rows, load_rows
from eagle3.store.states import StateStore


def open_split(split: Split) -> tuple[Rows, StateStore]:
    """A split's rows, and the states that belong to them."""
    rows = load_rows(Corpus.home / f"{split}.zarr")
    return rows, StateStore.open(HiddenStates.home / f"{split}.zarr")
