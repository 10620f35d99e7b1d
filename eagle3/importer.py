"""Convert a drafter that others published into the plain format, saying each thing it changes.

Letters: D draft vocabulary, V target vocabulary, H width.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.artifacts import write_atomically
from eagle3.check import EMBEDDING, check_drafter, looks_absolute
from eagle3.contract import (
    AUX_STATES,
    CONFIG_FILE,
    FIXED,
    LAYER_IDS,
    NESTED,
    NOT_IN_THE_TABLE,
    WEIGHTS_FILE,
    default_layer_ids,
    draft_config,
    from_output_ids,
    layer_id_keys,
    plain_name,
    plain_view,
    rope_keys,
)
from eagle3.errors import CheckpointError
from eagle3.foreign_weights import read_weights
from eagle3.target_facts import TargetFacts, read_target
from eagle3.weights_file import to_float32

log = logging.getLogger(__name__)

DROPPED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Ends of names that trainers save beside the drafter's own tensors; engines take none of them."""

DEFAULT_ROPE_THETA = 10000.0
DEFAULT_EPSILON = 1e-6
"""What transformers' Llama assumes where a config names none."""


def import_drafter(
    folder: Path, out: Path, target: Path | None, layer_ids: Sequence[int] | None
) -> tuple[str, ...]:
    """Write the drafter of `folder` to `out` in the plain format; returns what was changed.

    `target` settles what a layout leaves open: the numbering of layer ids, and whether an embedded
    embedding is the target's. `layer_ids`, in our convention, overrule what the config says.

    Raises:
        CheckpointError: `out` exists, a part is missing or unknown, or the result breaks the
            contract even so.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it, or import into another folder")
    facts = None if target is None else read_target(target)
    raw = _read_config(folder)
    notes: list[str] = []
    tensors = _rename(read_weights(folder), notes)
    _drop_embedding(tensors, facts, folder, notes)
    view = plain_view(raw)
    vocab = _vocab_size(view, facts, folder)
    _convert_maps(tensors, vocab, folder, notes)
    config = _config(view, tensors, vocab, folder, notes)
    config |= layer_id_keys(layer_ids or _layer_ids(raw, facts, folder, notes))
    tensors = _to_contract_dtypes(tensors, notes)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        write_atomically(partial / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        if faults := check_drafter(partial, target):
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise CheckpointError(f"{folder} cannot be made a sound drafter; mend:{listed}")
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for note in notes:
        log.info("%s", note)
    return tuple(notes)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it there") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object; copy it again")
    return config


def _rename(tensors: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    kept = {name: t for name, t in tensors.items() if not name.endswith(DROPPED)}
    if dropped := sorted(tensors.keys() - kept.keys()):
        notes.append(f"left out {', '.join(dropped)}: engines take the target's")
    renamed = {plain_name(name): tensor for name, tensor in kept.items()}
    if changed := sorted(kept.keys() - renamed.keys()):
        notes.append(f"renamed {len(changed)} tensors ({changed[0]} to {plain_name(changed[0])})")
    return renamed


def _drop_embedding(
    tensors: dict[str, Tensor], target: TargetFacts | None, folder: Path, notes: list[str]
) -> None:
    embedding_VH = tensors.pop(EMBEDDING, None)
    if embedding_VH is None:
        return
    if target is None or target.embedding is None:
        notes.append(
            f"left out {EMBEDDING}: engines share the target's (--target proves that it is that)"
        )
        return
    file, name = target.embedding
    theirs_VH = torch.from_numpy(to_float32(np.array(file.raw(name)), file.entries[name].dtype))
    own_VH = embedding_VH.float()
    # Half-precision copies of the target's embedding differ by rounding alone.
    if own_VH.shape != theirs_VH.shape or not torch.allclose(
        own_VH, theirs_VH, rtol=0.02, atol=1e-3
    ):
        raise CheckpointError(
            f"{folder} has an {EMBEDDING} that is not the target's; its drafter was trained on "
            "another embedding, and no engine can share this target's: name its own target"
        )
    notes.append(f"left out {EMBEDDING}: it is the target's, which engines share")


def _vocab_size(view: Mapping[str, Any], target: TargetFacts | None, folder: Path) -> int:
    vocab = target.vocab_size if target is not None else view.get("vocab_size")
    if not isinstance(vocab, int):
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has no vocab_size; name the target: --target"
        )
    return vocab


def _convert_maps(tensors: dict[str, Tensor], vocab: int, folder: Path, notes: list[str]) -> None:
    head_DH = _need(tensors, "lm_head.weight", folder)
    drafted = len(head_DH)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if drafted == vocab:
        if d2t is not None or t2d is not None:
            notes.append("left out d2t and t2d: the draft vocabulary is the whole one")
        return
    if d2t is None and t2d is None:
        raise CheckpointError(
            f"{folder} drafts {drafted} of {vocab} tokens but has no d2t, in the weights or beside "
            "them; without it nobody can tell which"
        )
    kept = None if t2d is None else t2d.bool().nonzero().flatten()
    if d2t is None:
        assert kept is not None, "one of the two is there"
        ids_D = kept
        notes.append("built d2t from t2d")
    elif looks_absolute(d2t.numpy(), None if kept is None else kept.numpy(), vocab):
        ids_D = d2t.long()
        notes.append("turned d2t from target ids into offsets")
    else:
        ids_D = d2t.long() + torch.arange(len(d2t))
    if len(ids_D) != drafted or len(ids_D.unique()) != drafted or not _inside(ids_D, vocab):
        raise CheckpointError(
            f"{folder}: d2t names {len(ids_D.unique())} different tokens, of {vocab}, "
            f"for a head of {drafted} rows; they are another drafter's, fetch its own"
        )
    ids_D, order_D = ids_D.sort()
    if not torch.equal(order_D, torch.arange(drafted)):
        tensors["lm_head.weight"] = head_DH[order_D]
        notes.append("sorted d2t, and the rows of lm_head with it")
    tensors["d2t"] = ids_D - torch.arange(drafted)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids_D, True)
    if t2d is None:
        notes.append("built t2d from d2t")


def _inside(ids_D: Tensor, vocab: int) -> bool:
    return bool(ids_D.min() >= 0 and ids_D.max() < vocab)


def _config(
    view: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vocab: int,
    folder: Path,
    notes: list[str],
) -> dict[str, Any]:
    drafted, width = _need(tensors, "lm_head.weight", folder).shape
    heads = _number(view, "num_attention_heads", folder)
    parameters = view.get("rope_parameters") or {}
    theta = view.get("rope_theta") or parameters.get("rope_theta")
    if theta is None:
        notes.append(f"wrote rope_theta {DEFAULT_ROPE_THETA}, which engines assume where none is")
    scaling = view.get("rope_scaling")
    if not scaling and parameters.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    config = draft_config(
        aux_layers=(),
        hidden_size=width,
        target_hidden_size=_need(tensors, "fc.weight", folder).shape[1] // AUX_STATES,
        intermediate_size=_number(view, "intermediate_size", folder),
        num_attention_heads=heads,
        num_key_value_heads=view.get("num_key_value_heads") or heads,
        head_dim=view.get("head_dim") or width // heads,
        rms_norm_eps=float(view.get("rms_norm_eps") or DEFAULT_EPSILON),
        rope_theta=float(theta or DEFAULT_ROPE_THETA),
        max_position_embeddings=_number(view, "max_position_embeddings", folder),
        vocab_size=vocab,
        draft_vocab_size=drafted,
        fc_norm=bool(view.get("fc_norm")),
        norm_output=bool(view.get("norm_output")),
    )
    config |= rope_keys(config["rope_theta"], scaling)
    # What makes another network is carried over, so that the check refuses what it cannot prove.
    config |= {key: view[key] for key in NOT_IN_THE_TABLE if view.get(key)}
    config["norm_before_residual"] = view["norm_before_residual"]
    if changed := [key for key in FIXED if view.get(key) != FIXED[key]]:
        notes.append(f"wrote {', '.join(changed)} as the plain format has them")
    return config


def _layer_ids(
    raw: Mapping[str, Any], target: TargetFacts | None, folder: Path, notes: list[str]
) -> tuple[int, ...]:
    nested = raw.get(NESTED)
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    ids = raw.get(LAYER_IDS) or inner
    if not ids:
        if target is None:
            raise CheckpointError(
                f"{folder / CONFIG_FILE} names no layer ids, so engines take their default for the "
                "target's depth; name the target with --target, or the ids with --layer-ids"
            )
        ids = default_layer_ids(target.num_layers)
        notes.append(f"wrote layer ids {list(ids)}, the default that engines assume")
        return tuple(ids)
    shifted = from_output_ids(ids)
    default = None if target is None else default_layer_ids(target.num_layers)
    # The embedding's own state is never used, so a first id of 1 counts outputs (SGLang #25454).
    if shifted == default or (default is None and ids[0] == 1):
        notes.append(f"turned layer ids {list(ids)} into {list(shifted)}: they numbered outputs")
        return shifted
    if raw.get(LAYER_IDS) is None:
        notes.append(f"wrote the layer ids {list(ids)} at the top level too")
    return tuple(ids)


def _to_contract_dtypes(tensors: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    converted = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    changed = [name for name, tensor in tensors.items() if tensor.dtype != converted[name].dtype]
    if changed:
        notes.append(f"rounded {len(changed)} tensors to bfloat16")
    return converted


def _need(tensors: Mapping[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in tensors:
        raise CheckpointError(
            f"{folder} has no {name}: it is no EAGLE-3 drafter, or not all of one; fetch it again"
        )
    return tensors[name]


def _number(view: Mapping[str, Any], key: str, folder: Path) -> int:
    value = view.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{folder / CONFIG_FILE} has no {key}; write the drafter's there")
    return value
