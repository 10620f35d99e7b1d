"""The target stage: fetch the model, see that it is what params say, write data/target."""

import logging
import shutil
from pathlib import Path
from typing import Any

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams, TargetShape
from eagle3.errors import ParamsError, TargetError
from eagle3.target.folder import (
    CONFIG,
    architecture,
    config_value,
    files_sha256,
    read_json,
    ships_code,
    small_files,
    text_config,
    weight_files,
    weights_sha256,
)
from eagle3.target.sources import Fetched, fetch
from eagle3.target.weights import find_embedding, find_final_norm, find_head, is_tied
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)

# Config keys under which logits are more than head(norm(state)); Gemma's norm scales by 1 + weight.
LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Pick the low, middle and high states of the target that feed the drafter.

    A layer id here means "the residual stream after that many decoder layers": 0 is the embedding
    output, num_layers the last state, before the final norm. Tools that count the layer that wrote
    the state from 0 call the same three (1, n // 2 - 1, n - 4).

    Raises:
        ParamsError: the target is too shallow to give three different states.

    Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, eagle/traineagle3.
    """
    low, middle, high = ids = (2, num_layers // 2, num_layers - 3)
    if not low < middle < high:
        raise ParamsError(
            f"target.aux_layers: default is {list(ids)} for a target of {num_layers} layers, which "
            "are not three rising ids; name three of your own, or take a target of 7 layers or more"
        )
    return ids


def bring_target(params: TargetParams, out: Path) -> TargetModel:
    """Bring the target into `out`, with its weights or with a pointer to them.

    A killed run leaves its downloads in the workspace, and the next goes on from there.

    Raises:
        TargetError: it cannot be fetched or trusted, or is not what params say.
        ParamsError: too few layers for the default aux layers.
        DiskFullError: no room.
    """
    aux_layers = (
        default_aux_layers(params.shape.num_layers)
        if params.aux_layers == "default"
        else params.aux_layers
    )
    work = workspace("target", {"params": params.model_dump(mode="json")})
    with room_for("the target model", work):
        fetched = fetch(params.source, work)
        check_model(fetched.folder, params)
        result = work / "result"
        shutil.rmtree(result, ignore_errors=True)
        whole = params.weights == "copy"
        if work in fetched.folder.parents:
            fetched.folder.replace(result)
        elif whole:
            copy_model(fetched.folder, result)
        target = describe(fetched, params, aux_layers, result if whole else fetched.folder)
        target.save(result)
        publish(result, out)
    shutil.rmtree(work)
    log.info(
        "target %s (%s): %d layers, hidden size %d, vocabulary %d, aux layers %s",
        *(target.source, target.architecture, target.num_layers, target.hidden_size),
        *(target.vocab_size, target.aux_layers),
    )
    return target


def check_model(folder: Path, params: TargetParams) -> None:
    """Refuse a model that is not what params say, runs code unasked, or has logits of its own kind.

    Raises:
        TargetError: as above; the message names the key, both values and the mend.
    """
    code = ships_code(folder)
    if code and not params.trust_remote_code:
        raise TargetError(
            f"{code} asks to run code that comes with the model; look at that code, then set "
            "target.trust_remote_code: true and pin target.source to a commit"
        )
    found = found_shape(folder)
    wrong = [
        f"target.shape.{key} is {wanted}, but {params.source} has {getattr(found, key)}"
        for key, wanted in params.shape.model_dump().items()
        if wanted != getattr(found, key)
    ]
    if wrong:
        raise TargetError(f"{'; '.join(wrong)}; mend the shape, or target.source")
    find_final_norm(folder)
    config_value(folder, "rms_norm_eps")
    if not is_tied(folder):
        find_head(folder)
    _refuse_other_logits(folder)


def found_shape(folder: Path) -> TargetShape:
    """Layers, width and vocabulary by the config, which the embedding's header must bear out."""
    keys = ("num_hidden_layers", "hidden_size", "vocab_size")
    num_layers, hidden_size, vocab_size = (int(config_value(folder, key)) for key in keys)
    embedding = find_embedding(folder)
    if embedding.shape != (vocab_size, hidden_size):
        raise TargetError(
            f"{embedding.name} in {embedding.file} is {list(embedding.shape)}, but "
            f"{folder / CONFIG} says vocab_size {vocab_size} and hidden_size {hidden_size}; "
            "fetch the model again"
        )
    return TargetShape(num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)


def _refuse_other_logits(folder: Path) -> None:
    part: dict[str, Any] = text_config(read_json(folder / CONFIG))
    reason = next((f"`{key}`: {part[key]}" for key in LOGIT_KEYS if part.get(key)), None)
    if reason is None and str(part.get("model_type", "")).startswith("gemma"):
        reason = f"`model_type`: {part['model_type']}"
    if reason:
        raise TargetError(
            f"{folder / CONFIG} has {reason}: its logits are not head(norm(state)), which drafters "
            "are trained on; set target.source to another model"
        )


def copy_model(source: Path, into: Path) -> None:
    """Copy weights, config, tokenizer and code, file by file, as real files.

    Raises:
        TargetError: a weight file is missing.
    """
    into.mkdir()
    for path in [*small_files(source), *weight_files(source)]:
        copy = into / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def describe(
    fetched: Fetched, params: TargetParams, aux_layers: tuple[int, int, int], folder: Path
) -> TargetModel:
    """The record of a model whose files lie in `folder`: beside the record, or where they were."""
    whole = params.weights == "copy"
    return TargetModel(
        made_from={},
        source=params.source,
        revision=fetched.revision,
        weights_sha256=weights_sha256(folder, whole=whole),
        files_sha256=files_sha256(folder),
        weights_folder="." if whole else str(fetched.folder.resolve()),
        architecture=architecture(read_json(folder / CONFIG)),
        **found_shape(folder).model_dump(),
        tied=is_tied(folder),
        aux_layers=aux_layers,
        trust_remote_code=params.trust_remote_code,
    )
