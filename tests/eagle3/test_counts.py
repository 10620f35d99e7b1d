from pathlib import Path

import pytest
import torch

from eagle3.config import Params, VocabSize, check_params, load_params
from eagle3.counts import parameter_table
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.errors import ParamsError

KIMI_SHAPE = {"num_layers": 61, "hidden_size": 7168, "vocab_size": 163_840}
KIMI_DRAFTER = {
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 8192,
    "fc_norm": False,
    "norm_output": False,
}


def kimi_params(tiny_params: Params) -> Params:
    raw = tiny_params.model_dump(mode="json")
    raw["target"]["shape"] = KIMI_SHAPE
    raw["drafter"] = KIMI_DRAFTER
    return check_params(raw, "kimi")


@pytest.mark.parametrize(
    ("size", "trainable", "total"),
    [
        (32_000, 1_190_948_864, 2_594_737_152),
        ("full", 2_135_977_984, 4_484_795_392),
    ],
)
def test_the_seed_run_has_the_parameters_that_it_reported(
    tiny_params: Params, size: VocabSize, trainable: int, total: int
):
    table = parameter_table(kimi_params(tiny_params), size)

    assert table.trainable == trainable
    assert table.total == total
    assert table.frozen == total - trainable


@pytest.mark.parametrize(
    ("size", "trainable"), [(32_000, 1_190_948_864 - 229_376_000), ("full", 961_572_864)]
)
def test_a_frozen_head_is_the_targets_rows_and_is_counted_once(
    tiny_params: Params, size: VocabSize, trainable: int
):
    params = kimi_params(tiny_params)
    frozen = params.model_copy(update={"train": params.train.model_copy(update={"head": "frozen"})})
    trained_table, table = parameter_table(params, size), parameter_table(frozen, size)

    assert table.trainable == trainable
    assert table.frozen == trained_table.frozen
    assert [tensor.name for tensor in table.tensors if not tensor.trainable] == [
        "target embedding",
        "lm_head.weight",
        "target final norm",
    ]


@pytest.mark.parametrize("norms", [False, True])
def test_trainable_parameters_are_those_of_the_network_itself(tiny_params: Params, norms: bool):
    drafter = tiny_params.drafter.model_copy(update={"fc_norm": norms, "norm_output": norms})
    tiny_params = tiny_params.model_copy(update={"drafter": drafter})
    shape = tiny_params.target.shape
    sizes = DraftShape.of(tiny_params.drafter, shape.hidden_size, shape.vocab_size, 128)
    with torch.device("meta"):
        net = DrafterNet(sizes)

    table = parameter_table(tiny_params, 128)

    counted = {tensor.name: tensor.shape for tensor in table.tensors if tensor.trainable}
    assert counted == {name: tuple(tensor.shape) for name, tensor in net.named_parameters()}
    assert table.trainable == sum(tensor.numel() for tensor in net.parameters())


def test_a_draft_vocabulary_above_the_targets_names_the_largest_one(tiny_params: Params):
    with pytest.raises(ParamsError, match=r"must be below the target's 320 .* or full"):
        parameter_table(tiny_params, 320)


@pytest.mark.parametrize("preset", sorted(Path("presets").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_counts_for_each_of_its_sizes(preset: Path):
    params = load_params(preset)

    tables = [parameter_table(params, size) for size in params.vocab.sizes]

    assert all(table.trainable > table.draft_vocab for table in tables)
