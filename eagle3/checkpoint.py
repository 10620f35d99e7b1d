"""Drafters and training states at rest: safetensors and JSON, written whole or not at all.

A drafter's folder is the plain format that engines load (contract.py): bfloat16 weights, the maps
as `d2t` and `t2d`, no embedding. A training state is float32 and holds the optimizer's moments too.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.artifacts import write_atomically
from eagle3.contract import CONFIG_FILE, NORM_SWITCHES, WEIGHTS_FILE, draft_config
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.errors import CheckpointError
from eagle3.maps import VocabMaps, full_vocab
from eagle3.unfinished import unfinished
from eagle3.work import room_for

STATE_TENSORS = "state.safetensors"
STATE_FACTS = "state_json"
"""Key of the facts inside the tensor file's own header: one file, one rename, no torn pair."""


def save_drafter(
    net: DrafterNet, maps: VocabMaps, aux_layers: tuple[int, int, int], folder: Path
) -> None:
    """Write config.json and model.safetensors; a full vocabulary has no maps."""
    shape = net.shape
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in net.named_parameters()
    }
    if shape.draft_vocab != shape.vocab_size:
        tensors |= {"d2t": maps.d2t_D.cpu(), "t2d": maps.t2d_V.cpu()}
    config = config_of(shape, aux_layers)
    _save_tensors(tensors, {"format": "pt"}, folder / WEIGHTS_FILE)
    write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def config_of(shape: DraftShape, aux_layers: tuple[int, int, int]) -> dict[str, Any]:
    """Build the config.json of a drafter of this shape that reads these layers."""
    return draft_config(
        aux_layers=aux_layers,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        max_position_embeddings=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
    )


def load_drafter(folder: Path) -> tuple[DrafterNet, VocabMaps]:
    """Read a drafter in the plain format, in float32 on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors are missing, unknown or misshapen.
    """
    config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    try:
        config = json.loads(config_path.read_text())
        tensors = load_file(weights_path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is not a drafter: {error}; `eagle3 check {folder}` names every fault"
        ) from error
    config = dict.fromkeys(NORM_SWITCHES, False) | config
    shape = DraftShape(
        draft_vocab=config["draft_vocab_size"],
        **{key: config[key] for key in DraftShape.__dataclass_fields__ if key != "draft_vocab"},
    )
    maps = _maps_of(tensors, shape, weights_path)
    with torch.device("meta"):
        net = DrafterNet(shape)
    try:
        net.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{weights_path} does not fit {config_path}: {error}") from error
    return net, maps


def save_training_state(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Replace the folder's training state by this one, in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    _save_tensors(kept, {STATE_FACTS: json.dumps(facts)}, folder / STATE_TENSORS)


def load_training_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read a training state, or None where there is none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / STATE_TENSORS
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[STATE_FACTS])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); delete {folder} to train from the start"
        ) from error


def _maps_of(tensors: dict[str, Tensor], shape: DraftShape, path: Path) -> VocabMaps:
    if shape.draft_vocab == shape.vocab_size:
        return full_vocab(shape.vocab_size)
    try:
        return VocabMaps(tensors.pop("d2t"), tensors.pop("t2d"))
    except KeyError as error:
        raise CheckpointError(
            f"{path} has no {error.args[0]}, but its config has a draft vocabulary of "
            f"{shape.draft_vocab} of {shape.vocab_size}; take the maps from where it was trained"
        ) from error


def _save_tensors(tensors: dict[str, Tensor], facts: dict[str, str], path: Path) -> None:
    partial = unfinished(path)
    with room_for(path.name, path.parent):
        save_file(tensors, partial, metadata=facts)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
    partial.replace(path)
