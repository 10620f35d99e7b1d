"""What a drafter's checker and importer must know of its target, read without loading the model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eagle3.artifacts import TargetModel
from eagle3.errors import TargetError
from eagle3.target.folder import CONFIG, architecture, read_json, text_config, weight_files
from eagle3.weights_file import WeightsFile

HEAD_NAMES = ("lm_head.weight", "embed_tokens.weight")
"""Ends of the head's name, best first: a tied target stores its head as the embedding."""


@dataclass(frozen=True)
class TargetFacts:
    """Sizes of a target, and where its head lies."""

    folder: Path
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, int, int] | None
    """The ids that our pipeline extracts; None for a folder that is not its `target` stage's."""
    head: tuple[WeightsFile, str] | None
    """The file and name of the output head; None where the folder has no weights."""
    embedding: tuple[WeightsFile, str] | None

    def head_rows(self, ids: NDArray[np.int64] | slice) -> NDArray[np.float32]:
        """Read rows of the head, [len(ids), H]."""
        assert self.head is not None, "asked only where there are weights"
        file, name = self.head
        return file.floats(name, ids)


def read_target(path: Path) -> TargetFacts:
    """Read the facts of a target stage's folder (with our record) or of a Hugging Face folder.

    Raises:
        TargetError: neither of the two, or a size is missing.
    """
    aux_layers, folder = None, path
    if (path / TargetModel.manifest).is_file():
        record = TargetModel.load(path)
        aux_layers, folder = record.aux_layers, record.folder(path)
    config = read_json(folder / CONFIG)
    text = text_config(config)
    sizes = {key: text.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    missing = [key for key, value in sizes.items() if not isinstance(value, int)]
    if missing:
        raise TargetError(
            f"{folder / CONFIG} has no {', '.join(missing)}; give --target the folder of the "
            "target model, not of a drafter"
        )
    head, embedding = _find(folder, HEAD_NAMES), _find(folder, HEAD_NAMES[1:])
    return TargetFacts(
        folder=folder,
        architecture=architecture(config),
        num_layers=int(sizes["num_hidden_layers"] or 0),
        hidden_size=int(sizes["hidden_size"] or 0),
        vocab_size=int(sizes["vocab_size"] or 0),
        aux_layers=aux_layers,
        head=head,
        embedding=embedding,
    )


def _find(folder: Path, endings: tuple[str, ...]) -> tuple[WeightsFile, str] | None:
    # A config alone still tells the sizes: a large target need not lie on this machine.
    if not any(folder.glob("*.safetensors*")):
        return None
    files = [WeightsFile(path) for path in weight_files(folder)]
    for ending in endings:
        for file in files:
            for name in file.entries:
                if name == ending or name.endswith(f".{ending}"):
                    return file, name
    return None
