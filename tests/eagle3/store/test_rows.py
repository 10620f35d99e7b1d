"""Rows at rest: what is written is read, and damage is an error rather than zeros."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle3.errors import StoreError
from eagle3.store.rows import Rows, load_rows, rows_sha256, save_rows


@pytest.fixture
def rows() -> Rows:
    return Rows(
        tokens_N=np.array([5, 6, 7, 49151, 8], dtype=np.int32),
        loss_mask_N=np.array([False, True, True, False, True]),
        offsets_R1=np.array([0, 3, 5], dtype=np.int64),
        domains=("chat", "code"),
        row_ids=("a1", "b2"),
    )


def test_rows_come_back_as_they_were_saved(rows: Rows, tmp_path: Path) -> None:
    save_rows(rows, tmp_path / "train.zarr")
    found = load_rows(tmp_path / "train.zarr")

    assert found.tokens_N.tolist() == rows.tokens_N.tolist()
    assert found.loss_mask_N.tolist() == rows.loss_mask_N.tolist()
    assert found.offsets_R1.tolist() == rows.offsets_R1.tolist()
    assert (found.domains, found.row_ids) == (rows.domains, rows.row_ids)
    assert found.tokens_N[found.span(1)].tolist() == [49151, 8]
    assert rows_sha256(found) == rows_sha256(rows)


def test_a_split_without_rows_can_be_saved(tmp_path: Path) -> None:
    empty = Rows(
        np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(1, np.int64), domains=(), row_ids=()
    )
    save_rows(empty, tmp_path / "eval.zarr")

    assert len(load_rows(tmp_path / "eval.zarr")) == 0


def test_saving_again_replaces_the_rows(rows: Rows, tmp_path: Path) -> None:
    save_rows(rows, tmp_path / "train.zarr")
    save_rows(replace(rows, domains=("docs", "docs")), tmp_path / "train.zarr")

    assert load_rows(tmp_path / "train.zarr").domains == ("docs", "docs")


def test_the_hash_sees_every_field(rows: Rows) -> None:
    others = [
        replace(rows, tokens_N=rows.tokens_N + np.int32(1)),
        replace(rows, loss_mask_N=~rows.loss_mask_N),
        replace(rows, offsets_R1=np.array([0, 2, 5])),
        replace(rows, domains=("chat", "chat")),
        replace(rows, row_ids=("a1", "b3")),
    ]
    assert len({rows_sha256(each) for each in [rows, *others]}) == 6


@pytest.mark.parametrize("array", ["tokens", "loss_mask", "offsets", "domain", "row_id"])
def test_a_missing_chunk_is_damage_and_not_zeros(rows: Rows, tmp_path: Path, array: str) -> None:
    save_rows(rows, tmp_path / "train.zarr")
    for chunk in (tmp_path / "train.zarr" / array / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()

    with pytest.raises(StoreError, match=r"damaged.*dvc repro corpus"):
        load_rows(tmp_path / "train.zarr")


def test_missing_rows_name_the_stage_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no rows; run `dvc repro corpus`"):
        load_rows(tmp_path / "train.zarr")


def test_unfinished_rows_are_refused(rows: Rows, tmp_path: Path) -> None:
    save_rows(rows, tmp_path / "train.zarr")
    description = tmp_path / "train.zarr" / "zarr.json"
    description.write_text(description.read_text().replace('"sha256"', '"other"'))

    with pytest.raises(StoreError, match=r"unfinished.*dvc repro corpus"):
        load_rows(tmp_path / "train.zarr")
