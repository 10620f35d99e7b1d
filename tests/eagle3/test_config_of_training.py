"""Keys of the train section that do not go together."""

from typing import Any

import pytest
from raw_params import assert_refused

from eagle3.config import check_params


def test_a_frozen_head_must_start_from_the_targets_rows(raw: dict[str, Any]):
    raw["train"] |= {"head": "frozen", "head_init": "random"}
    assert_refused(raw, "set head_init to target: a head that is not trained")

    raw["train"]["head_init"] = "target"
    assert check_params(raw, "params.yaml").train.head == "frozen"


def test_processes_that_cannot_share_a_step_name_the_number_to_raise(raw: dict[str, Any]):
    raw["train"] |= {"accumulate": 6, "processes": 4}
    assert_refused(raw, r"train.accumulate \(6\) must be a multiple of train.processes .* to 8 ")


def test_parts_for_one_process_name_the_key_to_set(raw: dict[str, Any]):
    raw["train"] |= {"sharding": "full", "processes": 1}
    assert_refused(raw, r"raise it to the number of GPUs, or set train\.sharding to none")


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cuda"), ("bfloat16", "cpu")])
def test_float8_head_products_are_refused_where_no_hot_path_is(
    raw: dict[str, Any], dtype: str, device: str
):
    raw["train"] |= {"head_products": "float8", "dtype": dtype, "device": device}
    assert_refused(raw, r"set them to bfloat16 and cuda, or train\.head_products to dtype")
    raw["train"] |= {"dtype": "bfloat16", "device": "auto"}
    assert check_params(raw, "params.yaml").train.head_products == "float8"


@pytest.mark.parametrize(
    ("section", "values", "found"),
    [
        ("vocab", {"sizes": [1000, "full"]}, r"vocab\.sizes has 1000"),
        ("shape", {"vocab_size": 49153}, r"target\.shape\.vocab_size is 49153"),
        ("shape", {"hidden_size": 577}, r"target\.shape\.hidden_size is 577"),
    ],
)
def test_float8_head_products_need_sizes_of_whole_sixteens(
    raw: dict[str, Any], section: str, values: dict[str, Any], found: str
):
    raw["train"] |= {"head_products": "float8", "dtype": "bfloat16"}
    changed = raw["target"]["shape"] if section == "shape" else raw[section]
    changed |= values
    assert_refused(raw, found + r", no multiple of 16.*set train\.head_products to dtype")


def test_states_that_are_not_kept_are_read_by_one_process(raw: dict[str, Any]):
    raw["extract"]["keep"] = False
    raw["train"] |= {"processes": 2, "accumulate": 2}
    assert_refused(
        raw, r"train.processes is 2: .* set train.processes to 1, or extract.keep to true"
    )


def test_a_warmup_longer_than_training_is_refused(raw: dict[str, Any]):
    raw["train"] |= {"warmup_steps": 120, "total_steps": 120}
    assert_refused(raw, r"train.warmup_steps")
