"""Drafters and training states at rest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import NORM_SHAPE, TOY_SHAPE, toy_drafter, toy_maps

from eagle3.checkpoint import (
    load_drafter,
    load_training_state,
    save_drafter,
    save_training_state,
)
from eagle3.drafter import DraftShape
from eagle3.errors import CheckpointError
from eagle3.maps import full_vocab


@pytest.mark.parametrize("shape", [TOY_SHAPE, NORM_SHAPE], ids=["eagle3", "eagle3.1"])
def test_a_drafter_comes_back_with_its_weights_rounded_to_bfloat16(
    shape: DraftShape, tmp_path: Path
) -> None:
    net, maps = toy_drafter(shape), toy_maps()
    save_drafter(net, maps, (2, 4, 5), tmp_path)
    loaded, loaded_maps = load_drafter(tmp_path)

    assert loaded.shape == shape
    assert torch.equal(loaded_maps.ids_D, maps.ids_D)
    for name, tensor in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name


def test_a_full_vocabulary_is_saved_without_maps(tmp_path: Path) -> None:
    shape = replace(TOY_SHAPE, draft_vocab=TOY_SHAPE.vocab_size)
    save_drafter(toy_drafter(shape), full_vocab(shape.vocab_size), (2, 4, 5), tmp_path)
    _, maps = load_drafter(tmp_path)

    assert b"d2t" not in (tmp_path / "model.safetensors").read_bytes()
    assert maps.ids_D.tolist() == list(range(shape.vocab_size))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_drafter(toy_drafter(), toy_maps(), (2, 4, 5), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_drafter(tmp_path)


def test_a_reduced_vocabulary_without_maps_is_refused(tmp_path: Path) -> None:
    save_drafter(toy_drafter(), toy_maps(), (2, 4, 5), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size"] += 1
    full = replace(TOY_SHAPE, draft_vocab=TOY_SHAPE.vocab_size)
    save_drafter(toy_drafter(full), full_vocab(full.vocab_size), (2, 4, 5), tmp_path)
    config["draft_vocab_size"] = full.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match="has no d2t"):
        load_drafter(tmp_path)


def test_a_folder_that_is_no_drafter_names_the_command_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eagle3 check"):
        load_drafter(tmp_path)


def test_a_training_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {"net.a": torch.randn(3, 2), "optimizer.step.a": torch.tensor(4.0)}
    save_training_state(tmp_path, {"net.a": torch.zeros(1)}, {"step": 1})
    save_training_state(tmp_path, tensors, {"step": 2})
    found = load_training_state(tmp_path)

    assert found is not None
    assert found[1] == {"step": 2}
    assert found[0].keys() == tensors.keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in tensors.items())


def test_there_is_no_state_before_the_first_is_saved(tmp_path: Path) -> None:
    assert load_training_state(tmp_path) is None


def test_a_torn_training_state_names_the_folder_to_delete(tmp_path: Path) -> None:
    save_training_state(tmp_path, {"net.a": torch.zeros(100)}, {"step": 1})
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=f"delete {tmp_path}"):
        load_training_state(tmp_path)
