"""A warm start: training that goes on from a published drafter (`train.init_from`)."""

import json
from pathlib import Path
from typing import Any

import torch

from eagle3.artifacts import file_sha256
from eagle3.checkpoint import config_of, load_drafter
from eagle3.config import DrafterParams
from eagle3.contract import (
    CONFIG_FILE,
    LAYER_IDS,
    NORM_SWITCHES,
    NOT_IN_THE_TABLE,
    WEIGHTS_FILE,
)
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.errors import CheckpointError
from eagle3.maps import VocabMaps

MUST_AGREE = (
    *(key for key in DrafterParams.model_fields),
    "hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "rope_scaling",
    "norm_before_residual",
    LAYER_IDS,
)
"""Keys of config.json that change what the network computes, or what it is fed."""


def init_from_sha256(folder: str | None) -> dict[str, str]:
    """What a run that starts from the drafter of `folder` is made from, beside the stages' results.

    Raises:
        CheckpointError: it has no weights.
    """
    if folder is None:
        return {}
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} (train.init_from) does not exist; copy the drafter there")
    return {"init_from": file_sha256(path)}


def published_drafter(
    folder: Path, shape: DraftShape, aux_layers: tuple[int, int, int], maps: VocabMaps
) -> DrafterNet:
    """Load a drafter in the plain format as the first weights of a run, float32 on the CPU.

    Its optimizer state is not published, so the learning rate warms up again.

    Raises:
        CheckpointError: it is not the network that this run trains (each difference is named), its
            draft vocabulary is not `maps`, or its weights are damaged or not finite.
    """
    _require_same_network(folder, shape, aux_layers)
    net, its_maps = load_drafter(folder)
    if not torch.equal(its_maps.ids_D, maps.ids_D.cpu()):
        raise CheckpointError(
            f"{folder} (train.init_from) drafts other tokens than the vocab stage chose; "
            "run `dvc repro --force vocab`"
        )
    for name, parameter in net.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE}: {name} is not finite; fetch the drafter again"
            )
    return net


def _require_same_network(
    folder: Path, shape: DraftShape, aux_layers: tuple[int, int, int]
) -> None:
    path, absent = folder / CONFIG_FILE, dict.fromkeys(NORM_SWITCHES, False)
    try:
        its = {**absent, **json.loads(path.read_text())}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} (train.init_from) cannot be read ({error}); copy the drafter there"
        ) from error
    ours = {**absent, **config_of(shape, aux_layers)}
    faults = [
        f"{key} is {its.get(key)!r}, this run trains {ours[key]!r}{_fix(key, its.get(key))}"
        for key in MUST_AGREE
        if its.get(key) != ours[key]
    ]
    faults += [f"{key} is set, which we do not train" for key in NOT_IN_THE_TABLE if its.get(key)]
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise CheckpointError(
            f"{path} (train.init_from) describes another network than this run trains:{listed}\n"
            "mend params.yaml as it says; `eagle3 import` converts a drafter of another layout"
        )


def _fix(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in DrafterParams.model_fields:
        return f"; set drafter.{key} to {value!r}"
    return f"; set target.aux_layers to {value!r}" if key == LAYER_IDS else ""
