import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.artifacts import TargetModel
from eagle3.errors import TargetError
from eagle3.target import read_embedding, read_final_norm, read_head
from eagle3.target.weights import is_tied

from .conftest import KINDS, change_json, make_sharded

Weights = dict[str, Tensor]
Refer = Callable[[], TargetModel]


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_head_and_norm_are_found_in_every_kind_of_checkpoint(
    kind: str, plain: Path, weights: Weights, refer: Refer
):
    KINDS[kind](plain, weights)

    target = refer()

    embedding = weights["model.embed_tokens.weight"]
    assert torch.equal(read_embedding(target), embedding)
    assert target.tied == (kind == "tied")
    head = embedding if target.tied else weights["lm_head.weight"]
    assert torch.equal(read_head(target), head)
    norm, eps = read_final_norm(target)
    assert torch.equal(norm, weights["model.norm.weight"])
    assert eps == 1e-5
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 32, 320)


def test_a_tensor_is_read_without_opening_the_shards_of_others(
    plain: Path, weights: Weights, refer: Refer
):
    make_sharded(plain, weights)
    target = refer()
    index = json.loads((plain / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(index.values()) - {index["lm_head.weight"]}:
        (plain / file).write_bytes(b"no safetensors")

    assert torch.equal(read_head(target), weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "final norm"),
    ],
)
def test_a_missing_tensor_names_the_file_and_the_names_looked_for(
    name: str, what: str, plain: Path, weights: Weights, refer: Refer
):
    del weights[name]
    save_file(weights, plain / "model.safetensors")

    wanted = rf"plain/model.safetensors has no {what}: looked for {re.escape(name)}, "
    with pytest.raises(TargetError, match=wanted):
        refer()


def test_a_shard_that_is_not_there_is_named(plain: Path, weights: Weights, refer: Refer):
    make_sharded(plain, weights)
    (plain / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(TargetError, match=r"names model-00002-of-00003.safetensors, which is not"):
        refer()


def test_a_folder_without_safetensors_is_refused(plain: Path, refer: Refer):
    (plain / "model.safetensors").unlink()

    with pytest.raises(TargetError, match=r"point target.source at a model in safetensors format"):
        refer()


def test_a_norm_without_epsilon_in_the_config_names_the_key(plain: Path, refer: Refer):
    config = json.loads((plain / "config.json").read_text())
    del config["rms_norm_eps"]
    (plain / "config.json").write_text(json.dumps(config))

    with pytest.raises(TargetError, match=r"has no `rms_norm_eps`"):
        refer()


def test_a_config_silent_on_tying_is_settled_by_the_weights(plain: Path, weights: Weights):
    config = json.loads((plain / "config.json").read_text())
    del config["tie_word_embeddings"]
    (plain / "config.json").write_text(json.dumps(config))
    assert not is_tied(plain)

    del weights["lm_head.weight"]
    save_file(weights, plain / "model.safetensors")
    assert is_tied(plain)


def test_a_tied_target_reads_its_embedding_also_where_the_file_has_a_head(
    plain: Path, refer: Refer
):
    change_json(plain / "config.json", tie_word_embeddings=True)

    target = refer()

    embedding = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(read_head(target), embedding)
