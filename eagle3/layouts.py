"""Where other trainers put a drafter's weights and maps: pickles, shards, side files."""

from pathlib import Path

from eagle3.contract import WEIGHTS_FILE

PICKLES = (".bin", ".pt", ".pth")
SIDE_FILES = ("d2t", "t2d", "vocab_mapping", "vocab_map", "token_map")
"""Starts of the names under which public trainers keep the maps beside the weights."""


def map_side_files(folder: Path) -> list[Path]:
    """Files that hold maps outside the weights, d2t first."""
    return [
        path
        for start in SIDE_FILES
        for path in sorted(folder.glob(f"{start}*"))
        if path.suffix in (*PICKLES, ".npy", ".safetensors")
    ]


def other_weight_files(folder: Path) -> list[Path]:
    """Files of weights other than the contract's one: safetensors by any name, else pickles."""
    sides = set(map_side_files(folder))
    tensors = [path for path in sorted(folder.glob("*.safetensors")) if path.name != WEIGHTS_FILE]
    pickles = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in PICKLES and not path.name.startswith(("training_args", "optimizer"))
    ]
    return [path for path in tensors if path not in sides] or [
        path for path in pickles if path not in sides
    ]
