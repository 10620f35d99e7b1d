"""The target's embedding, head and final norm, each read alone: by name, from its own file.

Nothing here loads the model, so a tensor of a terabyte model costs its own bytes only.
Shapes: V target vocabulary, H target width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eagle3.artifacts import TargetModel
from eagle3.errors import TargetError
from eagle3.target.folder import (
    CONFIG,
    SHARD_INDEX,
    SINGLE_FILE,
    config_value,
    open_weights,
    read_json,
    text_config,
    weight_files,
    weight_map,
)

# A plain language model; the wrapper of Kimi-K2.5 and LLaVA; that of transformers since 4.52.
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
NORM_NAMES = (
    "model.norm.weight",
    "language_model.model.norm.weight",
    "model.language_model.norm.weight",
)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Read from the file's header alone."""
        with open_weights(self.file) as tensors:
            return tuple(tensors.get_slice(self.name).get_shape())

    def read(self) -> Tensor:
        """The tensor, in the dtype it is stored in, on the CPU."""
        with open_weights(self.file) as tensors:
            return tensors.get_tensor(self.name)


def read_embedding(target: TargetModel, home: Path = TargetModel.home) -> Tensor:
    """The input embedding, [V, H], in the stored dtype.

    Raises:
        TargetError: not in the weights under any name we know.
    """
    return find_embedding(target.folder(home)).read()


def read_head(target: TargetModel, home: Path = TargetModel.home) -> Tensor:
    """The head, [V, H], in the stored dtype; the embedding's rows where the target ties them.

    Raises:
        TargetError: not in the weights under any name we know.
    """
    folder = target.folder(home)
    if target.tied:
        return find_embedding(folder).read()
    return find(folder, "head", HEAD_NAMES).read()


def read_final_norm(target: TargetModel, home: Path = TargetModel.home) -> tuple[Tensor, float]:
    """The RMS norm before the head: weight [H] in the stored dtype, and its epsilon.

    Raises:
        TargetError: not in the weights under any name we know, or no rms_norm_eps in the config.
    """
    folder = target.folder(home)
    eps = float(config_value(folder, "rms_norm_eps"))
    return find(folder, "final norm", NORM_NAMES).read(), eps


def find_embedding(folder: Path) -> Place:
    """Place of the input embedding in a Hugging Face folder."""
    return find(folder, "embedding", EMBEDDING_NAMES)


def find_head(folder: Path) -> Place:
    """Place of a head of its own."""
    return find(folder, "head", HEAD_NAMES)


def find_final_norm(folder: Path) -> Place:
    """Place of the final norm's weight."""
    return find(folder, "final norm", NORM_NAMES)


def is_tied(folder: Path) -> bool:
    """Whether the head is the embedding.

    The config decides where it says so. Where it is silent the weights do: transformers' own
    default differs from class to class.
    """
    config = read_json(folder / CONFIG)
    for part in (text_config(config), config):
        if "tie_word_embeddings" in part:
            return bool(part["tie_word_embeddings"])
    return not any(name in _tensor_names(folder) for name in HEAD_NAMES)


def find(folder: Path, what: str, names: Sequence[str]) -> Place:
    """Place of the tensor that has one of these names.

    Raises:
        TargetError: none of them is there.
    """
    files = _tensor_names(folder)
    for name in names:
        if name in files:
            return Place(files[name], name)
    listing = folder / (SHARD_INDEX if (folder / SHARD_INDEX).is_file() else SINGLE_FILE)
    raise TargetError(
        f"{listing} has no {what}: looked for {', '.join(names)} among {len(files)} tensors; "
        "mend target.source, or add this architecture's name to eagle3/target/weights.py"
    )


def _tensor_names(folder: Path) -> dict[str, Path]:
    """Every tensor's file, from the index or from the one file's header."""
    files = weight_files(folder)
    if (folder / SHARD_INDEX).is_file():
        return {name: folder / file for name, file in weight_map(folder).items()}
    with open_weights(files[0]) as tensors:
        return dict.fromkeys(tensors.keys(), files[0])
