"""Rows of which a state is no number: refused, named and counted, by whoever fills the store."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from poisoned import PoisonedEngine
from toy_store import LENGTHS, Silent, ToyEngine, toy_header, toy_rows

from eagle3.artifacts import Split
from eagle3.config import StateDtype
from eagle3.errors import StoreError
from eagle3.fill import TokenProgress, fill
from eagle3.refusals import Refusals
from eagle3.store.packing import MISSING
from eagle3.store.refused import Refused
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter

ROWS = toy_rows()
# Of 5, 9, 6, 20, 3, 11, 2 and 8 tokens in shards of 16: row 3 lies in shards 1 and 2, row 5 in 2
# and 3.
ACROSS, ALSO_ACROSS, INSIDE = 3, 5, 0


def tokens_of(row: int) -> list[int]:
    return ROWS.tokens_N[ROWS.span(row)].tolist()


def write(
    path: Path,
    bad: Sequence[int],
    limit: int,
    split: Split = "train",
    value: float = float("nan"),
    token: int = -1,
    dtype: StateDtype = "bfloat16",
) -> PoisonedEngine:
    """Start a store or go on with it, to its end."""
    engine = PoisonedEngine(ToyEngine(), [tokens_of(row) for row in bad], value, token)
    writer = StateWriter(path, toy_header(dtype=dtype), ROWS)
    refusals = Refusals(limit)
    refusals.add(split, writer.refused(writer.done))
    fill(writer, engine, split, TokenProgress(Silent(), ROWS.num_tokens), refusals)
    return engine


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
def test_a_refused_row_has_the_bytes_of_a_missing_shard_and_every_other_row_its_states(
    tmp_path: Path, dtype: StateDtype
) -> None:
    path = tmp_path / "train.zarr"
    write(path, [ACROSS], limit=1, dtype=dtype)
    write(tmp_path / "whole.zarr", [], limit=0, dtype=dtype)
    store, whole = StateStore.open(path), StateStore.open(tmp_path / "whole.zarr")

    for name in store.header.arrays:
        values_NP = np.asarray(zarr.open_group(path, mode="r")[name])
        assert (values_NP[ROWS.span(ACROSS)] == MISSING).all()
    for row in range(len(ROWS)):
        span = ROWS.span(row)
        if row != ACROSS:
            for found, expected in zip(
                store.read_spans([span]), whole.read_spans([span]), strict=True
            ):
                assert torch.equal(found, expected)
    assert store.rows_with_states(ROWS) == [0, 1, 2, 4, 5, 6, 7]
    assert store.info.refused_rows == 1
    assert store.verify() == []


def test_whoever_asks_for_a_refused_row_is_told_its_name_layer_and_token(tmp_path: Path) -> None:
    path = tmp_path / "train.zarr"
    write(path, [ACROSS], limit=1, token=17)
    store, span = StateStore.open(path), ROWS.span(ACROSS)

    for part in (span, slice(span.start, span.start + 1), slice(span.stop - 1, span.stop + 2)):
        with pytest.raises(
            StoreError, match=r"row row3 \(from its token 17 on, last state\).*leave the row out"
        ):
            store.read(part.start, part.stop)
    for near in (slice(span.start - 1, span.start), slice(span.stop, span.stop + 1)):
        store.read(near.start, near.stop)
    read = store.read_rows([ROWS.span(2), span, ROWS.span(4)])
    assert read.refused == (1,)
    assert read.aux_N3H.shape == (6 + 20 + 3, 3, 4)
    assert not read.aux_N3H[6:26].any()
    assert not read.last_NH[6:26].any()
    assert torch.equal(read.last_NH[26:], store.read_spans([ROWS.span(4)])[1])
    alone = store.read_rows([span])
    assert (alone.last_NH.shape, alone.last_NH.dtype) == ((20, 4), torch.bfloat16)


def test_the_first_bad_value_is_the_lowest_layer_of_the_earliest_token(tmp_path: Path) -> None:
    path = tmp_path / "train.zarr"
    write(path, [INSIDE], limit=1)

    [refused] = StateStore.open(path).refused
    assert refused == Refused(row="row0", start=0, stop=5, token=4, layer=4)
    assert str(refused) == "row row0 (from its token 4 on, state of layer 4)"


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("float32", 3.4e38, True),
        ("float32", float("inf"), False),
        ("bfloat16", 3.38e38, True),
        ("bfloat16", 3.4e38, False),
        ("float8", 3.2e38, True),
        ("float8", -3.38e38, False),
    ],
)
def test_a_row_is_refused_if_a_value_is_too_large_for_the_stored_dtype_and_kept_if_not(
    tmp_path: Path, dtype: StateDtype, value: float, fits: bool
) -> None:
    path = tmp_path / "train.zarr"
    write(path, [INSIDE], limit=1, value=value, dtype=dtype)
    store = StateStore.open(path)

    assert store.info.refused_rows == (0 if fits else 1)
    for row in store.rows_with_states(ROWS):
        assert all(torch.isfinite(states).all() for states in store.read_spans([ROWS.span(row)]))


def test_one_row_too_many_fails_with_names_count_limit_and_fix_and_finished_shards_stay(
    tmp_path: Path,
) -> None:
    path, bad = tmp_path / "train.zarr", [INSIDE, ACROSS, 7]
    with pytest.raises(
        StoreError,
        match=r"2 rows of train .*max_nonfinite_rows allows 1: row row0 .*, row row3 "
        r".*or raise extract.max_nonfinite_rows to 2 or more and run the same command again",
    ):
        write(path, bad, limit=1)
    kept = StateWriter(path, toy_header(), ROWS).done
    again = write(path, bad, limit=3)
    write(tmp_path / "at-once.zarr", bad, limit=3)

    assert kept == {0}
    assert again.rows == LENGTHS[2:], "shard 0 was there"
    assert files_of(path) == files_of(tmp_path / "at-once.zarr")


def test_refused_rows_of_shards_that_an_earlier_run_finished_count(tmp_path: Path) -> None:
    path = tmp_path / "train.zarr"
    write(path, [INSIDE, ACROSS], limit=2)

    with pytest.raises(StoreError, match=r"allows 1: row row0 .*raise extract.max_nonfinite_rows"):
        write(path, [INSIDE, ACROSS], limit=1)


def test_a_row_across_two_shards_counts_once_and_both_their_markers_name_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.zarr"
    caplog.set_level(logging.WARNING, "eagle3")
    write(path, [ACROSS, ALSO_ACROSS], limit=2)
    writer = StateWriter(path, toy_header(), ROWS)

    by_shard = [[row.row for row in writer.refused([shard])] for shard in range(4)]
    assert by_shard == [[], ["row3"], ["row3", "row5"], ["row5"]]
    assert [record.args[1].row for record in caplog.records] == ["row3", "row5"]  # type: ignore[index, union-attr]


def test_eval_may_lack_no_row_whatever_the_limit(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"1 row of eval .* eval may have none.*set .* extract.eval_state_dtype"
    ):
        write(tmp_path / "eval.zarr", [INSIDE], limit=100, split="eval")


def test_only_so_many_rows_are_named_in_an_error() -> None:
    refused = [
        Refused(row=f"row{number}", start=number, stop=number + 1, token=0, layer=2)
        for number in range(13)
    ]

    with pytest.raises(StoreError, match=r"13 rows .*row row9 \([^)]*\) and 3 more; set target"):
        Refusals(12).add("train", refused)
