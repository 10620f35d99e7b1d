"""From a drafter's folder to the one that an engine loads, in the plain or the speculators format.

The plain format is what training writes, so that export copies, after a check. The speculators
format holds the same tensors under its own names, and a config that says which target to serve.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from eagle3.artifacts import Drafter, write_atomically
from eagle3.check import check_drafter
from eagle3.contract import (
    CONFIG_FILE,
    LAYER_IDS,
    NESTED,
    NORM_SWITCHES,
    WEIGHTS_FILE,
    Format,
    is_speculators,
)
from eagle3.errors import CheckpointError
from eagle3.target_facts import read_target

OUTER_KEYS = ("architectures", "draft_vocab_size", "target_hidden_size", *NORM_SWITCHES)
"""Keys of the plain config that the speculators format keeps outside `transformer_layer_config`."""


def export_drafter(
    folder: Path, out: Path, to: Format, target: Path | None, draft_tokens: int
) -> None:
    """Write the drafter of `folder` to `out`, which must not exist.

    The speculators format names the `target` that engines then serve, and the number of
    `draft_tokens` that they draft unless told otherwise; the plain format holds neither.

    Raises:
        CheckpointError: `folder` breaks the contract, `out` exists, or no target is named for the
            speculators format.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it, or write elsewhere with --out")
    if to == "speculators" and target is None:
        raise CheckpointError(
            "the speculators format names the target that engines serve; add --target DIR"
        )
    require_sound(folder, target)
    config = json.loads((folder / CONFIG_FILE).read_text())
    if is_speculators(config):
        raise CheckpointError(
            f"{folder} is in the speculators format already; export from where it was trained, or "
            f"make it plain with `eagle3 import {folder} {out}`"
        )
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if to == "speculators":
            assert target is not None, "refused above"
            _write_speculators(folder, config, partial, target, draft_tokens)
        else:
            _copy(folder, partial)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_sound(folder: Path, target: Path | None) -> None:
    """Refuse a folder that breaks the contract.

    Raises:
        CheckpointError: there are faults; the first is named.
    """
    faults = check_drafter(folder, target)
    if faults:
        raise CheckpointError(
            f"{folder} breaks the contract in {len(faults)} place(s), first: {faults[0]}; "
            f"`eagle3 check {folder}` names them all"
        )


def speculators_config(
    config: Mapping[str, Any], target: str, architecture: str, draft_tokens: int
) -> dict[str, Any]:
    """Turn a plain config into the speculators format's.

    Source: vllm-project/speculators, models/eagle3/config.py; vLLM,
    transformers_utils/configs/speculators.
    """
    layer = {
        key: value for key, value in config.items() if key not in (*OUTER_KEYS, LAYER_IDS, NESTED)
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        # Written also where they are false: an absent norm_before_residual means True here.
        **{key: config.get(key, False) for key in NORM_SWITCHES},
        LAYER_IDS: config[LAYER_IDS],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _copy(folder: Path, out: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE, Drafter.manifest):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _write_speculators(
    folder: Path, config: Mapping[str, Any], out: Path, target: Path, draft_tokens: int
) -> None:
    facts = read_target(target)
    converted = speculators_config(config, str(facts.folder), facts.architecture, draft_tokens)
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor
        for name, tensor in load_file(folder / WEIGHTS_FILE).items()
    }
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    write_atomically(out / CONFIG_FILE, json.dumps(converted, indent=2) + "\n")
