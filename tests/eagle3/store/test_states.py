"""Hidden states at rest: exact, damage is found, and whole after a kill at any instant."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_store
from toy_store import ToyEngine, toy_header, toy_rows, write_toy_store

from eagle3.errors import StoreError
from eagle3.store.layout import marker_name
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter

DTYPES = ["bfloat16", "float32"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_toy_store(tmp_path / "train.zarr")
    return tmp_path / "train.zarr"


def files_of(store: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, but not what lies beside the store."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file()
    }


def all_states(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = toy_rows()
    states = ToyEngine().states([rows.tokens_N[rows.span(i)].tolist() for i in range(len(rows))])
    aux_N3H = torch.cat([each.aux_T3H for each in states])
    last_NH = torch.cat([each.last_TH for each in states])
    return aux_N3H.to(getattr(torch, dtype)), last_NH.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 64), (0, 1), (15, 17), (5, 40), (63, 64)])
def test_any_range_is_read_as_it_was_written(
    tmp_path: Path, dtype: str, start: int, stop: int
) -> None:
    write_toy_store(tmp_path / "train.zarr", dtype=dtype)
    aux_n3H, last_nH = StateStore.open(tmp_path / "train.zarr").read(start, stop)

    aux_N3H, last_NH = all_states(dtype)
    assert torch.equal(aux_n3H, aux_N3H[start:stop])
    assert torch.equal(last_nH, last_NH[start:stop])
    assert aux_n3H.dtype == last_nH.dtype == getattr(torch, dtype)


def test_ranges_in_any_order_are_read_one_behind_the_other(path: Path) -> None:
    spans = [slice(40, 64), slice(15, 17), slice(0, 33), slice(15, 17)]
    aux_n3H, last_nH = StateStore.open(path).read_spans(spans)

    aux_N3H, last_NH = all_states("bfloat16")
    assert torch.equal(aux_n3H, torch.cat([aux_N3H[span] for span in spans]))
    assert torch.equal(last_nH, torch.cat([last_NH[span] for span in spans]))


def test_the_store_says_what_it_holds(path: Path) -> None:
    store = StateStore.open(path)

    assert store.header == toy_header()
    assert store.header.last == "before final norm"
    assert (store.info.tokens, store.info.rows, store.info.target) == (64, 8, "toy")
    assert store.info.raw_bytes == 64 * 4 * 4 * 2
    assert store.info.ratio == store.info.bytes / store.info.raw_bytes
    assert store.info.dtype == "bfloat16"
    assert store.rows.row_ids == toy_rows().row_ids


def test_states_that_repeat_take_fewer_bytes_than_they_have(tmp_path: Path) -> None:
    header = toy_header(hidden_size=256)
    writer = StateWriter(tmp_path / "train.zarr", header, toy_rows())
    for shard in range(header.num_shards):
        aux_n3H, last_nH = writer.buffers(shard)
        writer.write(shard, aux_n3H.fill_(1.5), last_nH.fill_(-2))

    assert StateStore.open(tmp_path / "train.zarr").info.ratio < 0.5


def test_equal_states_give_equal_bytes_and_one_hash(path: Path, tmp_path: Path) -> None:
    write_toy_store(tmp_path / "again.zarr")

    assert files_of(tmp_path / "again.zarr") == files_of(path)
    assert StateStore.open(tmp_path / "again.zarr").sha256 == StateStore.open(path).sha256


def test_the_hash_of_other_states_differs(path: Path, tmp_path: Path) -> None:
    write_toy_store(tmp_path / "other.zarr", dtype="float32")

    assert StateStore.open(tmp_path / "other.zarr").sha256 != StateStore.open(path).sha256


def test_an_untouched_store_has_no_faults(path: Path) -> None:
    assert StateStore.open(path).verify() == []


def test_one_flipped_bit_is_named_by_shard_file_and_rows(path: Path) -> None:
    victim = path / "last" / "c.2.0.0"
    content = bytearray(victim.read_bytes())
    content[20] ^= 4
    victim.write_bytes(content)

    [fault] = StateStore.open(path).verify()
    assert (fault.shard, fault.file, fault.tokens) == (2, "last/c.2.0.0", range(32, 48))
    # Row 3 is tokens 20 to 39, and row 5 43 to 53.
    assert fault.rows == ("row3", "row4", "row5")
    assert "was written" in fault.what


def test_reading_a_damaged_shard_is_an_error_and_not_other_states(path: Path) -> None:
    victim = path / "aux" / "c.1.0.0.0"
    content = bytearray(victim.read_bytes())
    content[len(content) // 3] ^= 1
    victim.write_bytes(content)

    with pytest.raises(StoreError, match=r"damaged: .*run `dvc repro --force extract`"):
        StateStore.open(path).read(16, 32)


def test_a_shard_that_is_cut_short_is_refused_at_opening(path: Path) -> None:
    victim = path / "aux" / "c.1.0.0.0"
    victim.write_bytes(victim.read_bytes()[:-1])

    with pytest.raises(StoreError, match=r"aux/c.1.0.0.0 is damaged: it has \d+ bytes of \d+; run"):
        StateStore.open(path)


def test_a_shard_that_is_gone_is_refused_at_opening_and_at_reading(path: Path) -> None:
    store = StateStore.open(path)
    (path / "last" / "c.3.0.0").unlink()

    with pytest.raises(StoreError, match=r"it is missing; run `dvc repro --force extract`"):
        store.read(40, 50)
    with pytest.raises(StoreError, match=r"it is missing; run `dvc repro --force extract`"):
        StateStore.open(path)


def test_an_unfinished_store_says_how_much_of_it_is_done(path: Path) -> None:
    (path / marker_name(1)).unlink()

    with pytest.raises(
        StoreError, match=r"unfinished: 3 of its 4 shards .*run `dvc repro extract`"
    ):
        StateStore.open(path)


def test_no_store_names_the_stage_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no hidden states; run `dvc repro extract`"):
        StateStore.open(tmp_path / "train.zarr")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_fingerprint": "2" * 64}, "target_fingerprint is 1"),
        ({"engine": "toy 2.0"}, "engine is toy 1.0, wanted toy 2.0"),
        ({"aux_layers": (1, 4, 5)}, "aux_layers"),
        ({"dtype": "float32"}, "dtype is bfloat16, wanted float32"),
    ],
)
def test_a_store_made_from_something_else_is_not_continued(
    path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(StoreError, match=rf"{named}.*remove it, then run `dvc repro extract`"):
        StateWriter(path, toy_header(**changes), toy_rows())


def test_a_folder_of_something_else_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "train.zarr").mkdir()
    with pytest.raises(StoreError, match=r"holds no hidden states; remove it, then run `dvc repro"):
        write_toy_store(tmp_path / "train.zarr")


def test_what_a_kill_left_behind_is_removed_and_written_again(path: Path) -> None:
    expected = files_of(path)
    (path / marker_name(1)).unlink()
    (path / "aux" / "c.1.0.0.0").write_bytes(b"half a shard")
    (path / "last" / "c.1.0.f00.partial").write_bytes(b"half a file")
    (path / marker_name(2)).write_text("{")
    (path / "aux" / "c.3.0.0.0").unlink()

    write_toy_store(path)
    assert files_of(path) == expected


def test_a_store_killed_at_any_touch_of_the_disk_goes_on_to_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    expected = files_of(path)
    program = Path(toy_store.__file__)
    environment = {**os.environ, "PYTHONPATH": str(program.parents[1])}
    kills = tmp_path / "kills"
    subprocess.run(
        [sys.executable, str(program), str(kills), "3", "7"], env=environment, check=True
    )

    stores = sorted(kills.iterdir())
    done = {len(list(store.glob("train.zarr/shards/*.json"))) for store in stores}
    assert done == {0, 1, 2, 3, 4}, "kills before, between and after all shards"
    for store in stores:
        write_toy_store(store / "train.zarr")
        assert files_of(store / "train.zarr") == expected, store.name
        assert [path.name for path in store.iterdir()] == ["train.zarr"]
