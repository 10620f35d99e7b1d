import math

import pytest
from drafter_folders import drafter
from transformers import LlamaConfig

from eagle3.contract import (
    HEADER_DTYPES,
    draft_config,
    from_output_ids,
    plain_name,
    plain_view,
    tensor_table,
)

KIMI = {
    "aux_layers": (2, 30, 58),
    "hidden_size": 7168,
    "target_hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 163840,
}


@pytest.mark.parametrize(
    ("drafted", "trainable"), [(32000, 1_190_948_864), (163840, 2_135_977_984)]
)
def test_the_table_adds_up_to_the_seed_runs_parameters(drafted: int, trainable: int) -> None:
    table = tensor_table(draft_config(**KIMI, draft_vocab_size=drafted))

    weights = [spec for spec in table.values() if spec.dtype == "bfloat16"]
    assert sum(math.prod(spec.shape) for spec in weights) == trainable
    assert ("d2t" in table, "t2d" in table) == (
        (True, True) if drafted < 163840 else (False, False)
    )


def test_the_table_names_the_tensors_of_a_folder_built_by_hand() -> None:
    parts = drafter()
    stated = {
        name: (spec.shape, HEADER_DTYPES[spec.dtype])
        for name, spec in tensor_table(parts.config).items()
    }
    spelling = {"torch.bfloat16": "BF16", "torch.int64": "I64", "torch.bool": "BOOL"}

    assert stated == {
        name: (tuple(tensor.shape), spelling[str(tensor.dtype)])
        for name, tensor in parts.tensors.items()
    }


def test_old_and_new_readers_see_the_same_rope() -> None:
    config = draft_config(**KIMI, draft_vocab_size=32000)

    new_reader = LlamaConfig(**config)
    assert new_reader.rope_parameters == {"rope_theta": 50000.0, "rope_type": "default"}
    assert (config["rope_theta"], config["rope_scaling"]) == (50000.0, None)


def test_layer_ids_stand_at_the_top_level_and_in_eagle_config() -> None:
    config = draft_config(**KIMI, draft_vocab_size=32000)

    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]


def test_ids_of_layer_outputs_become_counts_of_layers_that_have_run() -> None:
    assert from_output_ids((1, 29, 57)) == (2, 30, 58)


def test_an_absent_norm_before_residual_means_true_in_the_speculators_format_only() -> None:
    assert plain_view({"hidden_size": 8})["norm_before_residual"] is False
    speculators = {"speculators_model_type": "eagle3", "transformer_layer_config": {"head_dim": 4}}
    assert plain_view(speculators)["norm_before_residual"] is True
    assert plain_view(speculators)["head_dim"] == 4


def test_other_trainers_names_become_the_plain_formats() -> None:
    assert plain_name("model.layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert plain_name("lm_head.weight") == "lm_head.weight"
