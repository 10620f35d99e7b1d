"""Read the weights and maps of a drafter that another trainer wrote, wherever it put them.

Letters: D draft vocabulary, V target vocabulary.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.contract import WEIGHTS_FILE
from eagle3.errors import CheckpointError
from eagle3.layouts import PICKLES, map_side_files, other_weight_files


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a drafter's folder, maps of side files included.

    Raises:
        CheckpointError: no weights, damaged ones, or a pickle that holds more than tensors.
    """
    single = folder / WEIGHTS_FILE
    files = [single] if single.is_file() else other_weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS_FILE}, nor shards, nor a .bin; copy the weights there"
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read_file(path)
    for path in map_side_files(folder):
        found = _read_file(path)
        tensors = {**found, **tensors}
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".npy":
        return {_map_name(path): _read_npy(path)}
    if path.suffix in PICKLES:
        return _read_pickle(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from error


def _read_npy(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except ValueError as error:
        raise CheckpointError(f"{path} is no plain array ({error}); copy it again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Load a pickle that can hold tensors and nothing else, so that no code of its author runs."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} does not load with weights_only ({reason}), so it may run code and is "
            "refused; ask its author for safetensors"
        ) from error
    if isinstance(content, Tensor):
        return {_map_name(path): content}
    named = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(named, dict) or not all(isinstance(t, Tensor) for t in named.values()):
        raise CheckpointError(f"{path} holds no table of tensors; ask its author for safetensors")
    return named


def _map_name(path: Path) -> str:
    return "t2d" if path.name.startswith("t2d") else "d2t"
