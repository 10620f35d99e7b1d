"""States in 8 bits: how far they may be off, and that the store says so."""

from pathlib import Path

import pytest
import torch
from toy_store import ToyEngine, toy_header, toy_rows, write_toy_store

from eagle3.errors import StoreError
from eagle3.store.packing import from_float8, to_float8
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter


def half_step(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Largest error of e4m3fn: 3 mantissa bits, and steps of 2^-9 below 2^-6."""
    return torch.maximum(states.abs() * 2**-4, scale[..., None] * 2**-10)


def wild_states() -> torch.Tensor:
    """Tokens as real targets have them: a channel a thousand times the others, and sizes apart."""
    draw = torch.Generator().manual_seed(0)
    states_n3H = torch.randn(50, 3, 64, generator=draw)
    states_n3H[:, :, 7] *= 1000
    return states_n3H * torch.logspace(-6, 6, 50)[:, None, None]


def test_no_value_is_off_by_more_than_half_a_step_of_its_scale() -> None:
    states_n3H = wild_states()
    codes, scale_n3 = to_float8(states_n3H)
    read_n3H = from_float8(codes, scale_n3)

    assert codes.dtype == torch.uint8
    assert read_n3H.dtype == torch.bfloat16
    off_n3H = (read_n3H.float() - states_n3H).abs()
    assert (off_n3H <= half_step(states_n3H, scale_n3)).all()
    # Half a step is reached, so the bound says something.
    assert (off_n3H > 0.9 * half_step(states_n3H, scale_n3)).any()


def test_reading_rounds_nothing_that_writing_has_not_rounded() -> None:
    codes, scale_n3 = to_float8(wild_states())

    exact_n3H = codes.view(torch.float8_e4m3fn).double() * scale_n3.double()[..., None]
    assert torch.equal(from_float8(codes, scale_n3).double(), exact_n3H)


def test_a_token_of_another_size_has_the_same_codes() -> None:
    states_n3H = wild_states()

    assert torch.equal(to_float8(states_n3H)[0], to_float8(states_n3H * 2**20)[0])
    assert torch.equal(to_float8(states_n3H)[1] * 2**20, to_float8(states_n3H * 2**20)[1])


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1.0, 448.0, 3e38])
def test_states_at_the_ends_of_float32_stay_finite(size: float) -> None:
    states_nH = torch.tensor([[size, -size, 0.0, size / 3]])
    codes, scale_n = to_float8(states_nH)
    read_nH = from_float8(codes, scale_n)

    assert torch.isfinite(read_nH).all()
    assert ((read_nH.float() - states_nH).abs() <= half_step(states_nH, scale_n)).all()


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (0, 1), (15, 17), (5, 40), (63, 64)])
def test_any_range_is_read_within_half_a_step(tmp_path: Path, start: int, stop: int) -> None:
    write_toy_store(tmp_path / "train.zarr", dtype="float8")
    store, rows = StateStore.open(tmp_path / "train.zarr"), toy_rows()
    states = ToyEngine().states([rows.tokens_N[rows.span(i)].tolist() for i in range(len(rows))])

    aux_N3H = torch.cat([each.aux_T3H for each in states])
    last_NH = torch.cat([each.last_TH for each in states])
    for found, all_states in zip(store.read(start, stop), (aux_N3H, last_NH), strict=True):
        written = all_states[start:stop]
        assert torch.equal(found, from_float8(*to_float8(written)))
        assert ((found.float() - written).abs() <= half_step(written, to_float8(written)[1])).all()


def test_the_store_says_that_it_has_8_bits(tmp_path: Path) -> None:
    write_toy_store(tmp_path / "train.zarr", dtype="float8")
    info = StateStore.open(tmp_path / "train.zarr").info

    assert info.dtype == "float8"
    # What is read is bfloat16, and so is what the ratio is to.
    assert info.raw_bytes == 64 * 4 * 4 * 2
    assert info.fingerprint != toy_header(dtype="bfloat16").fingerprint


def test_8_bits_take_less_than_half(tmp_path: Path) -> None:
    """Of values whose exponents differ as a real layer's do; real ones: docs/decisions/0005."""
    header = toy_header(hidden_size=512, dtype="float8")
    writer = StateWriter(tmp_path / "train.zarr", header, toy_rows())
    torch.manual_seed(0)
    for shard in range(header.num_shards):
        aux_n3H, last_nH = writer.buffers(shard)
        writer.write(shard, aux_n3H.normal_(), last_nH.normal_())

    assert StateStore.open(tmp_path / "train.zarr").info.ratio < 0.48


def test_a_store_of_8_bits_is_not_continued_in_another_dtype(tmp_path: Path) -> None:
    write_toy_store(tmp_path / "train.zarr", dtype="float8")

    with pytest.raises(StoreError, match=r"dtype is float8, wanted bfloat16.*remove it, then run"):
        write_toy_store(tmp_path / "train.zarr")
