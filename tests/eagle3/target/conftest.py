"""Tiny checkpoints of each kind that targets come in, all with the weights of `tiny_target`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.target import bring_target

Weights = dict[str, Tensor]


@pytest.fixture
def weights(tiny_target: Path) -> Weights:
    return load_file(tiny_target / "model.safetensors")


@pytest.fixture
def plain(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target that a test may change."""
    return Path(shutil.copytree(tiny_target, tmp_path / "plain"))


@pytest.fixture(autouse=True)
def _in_a_project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_sharded(weights: Weights, folder: Path) -> None:
    """Three shards and their index, as large models have them; the one file goes."""
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-{n + 1:05d}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_single(folder: Path, weights: Weights) -> None:
    """As it is."""


def make_sharded(folder: Path, weights: Weights) -> None:
    save_sharded(weights, folder)


def make_wrapped(folder: Path, weights: Weights) -> None:
    """As Kimi-K2.5: the language model's config nested, its tensors under `language_model.`."""
    wrap(folder)
    vision = {"vision_tower.patch_embed.weight": weights["model.norm.weight"].clone()}
    save_sharded({f"language_model.{name}": t for name, t in weights.items()} | vision, folder)


def make_wrapped_inside(folder: Path, weights: Weights) -> None:
    """As transformers writes multimodal models: `model.language_model.`, the head outside."""
    wrap(folder)
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, folder / "model.safetensors")


def make_tied(folder: Path, weights: Weights) -> None:
    change_json(folder / "config.json", tie_word_embeddings=True)
    kept = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def wrap(folder: Path) -> None:
    inner = json.loads((folder / "config.json").read_text())
    inner.pop("architectures")
    outer = {
        "architectures": ["WrappedForConditionalGeneration"],
        "model_type": "wrapped",
        "text_config": inner,
    }
    (folder / "config.json").write_text(json.dumps(outer))


KINDS: dict[str, Callable[[Path, Weights], None]] = {
    "single file": make_single,
    "sharded": make_sharded,
    "wrapped": make_wrapped,
    "wrapped inside": make_wrapped_inside,
    "tied": make_tied,
}


@pytest.fixture
def refer(plain: Path, tiny_target_params: TargetParams) -> Callable[[], TargetModel]:
    """Brings the copy `plain` in, as it is by then, by reference."""

    def bring() -> TargetModel:
        changes = {"source": str(plain), "weights": "reference"}
        return bring_target(tiny_target_params.model_copy(update=changes), TargetModel.home)

    return bring
