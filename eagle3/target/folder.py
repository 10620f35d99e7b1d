"""What a Hugging Face folder says of its model: config, end tokens, code it ships, its hashes."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle3.artifacts import TargetModel, file_sha256, fingerprint_of
from eagle3.errors import ArtifactError, TargetError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"

# All that a model is but its weights: config, tokenizer, template, code.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")

SAMPLE_BYTES = 1 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        TargetError: missing, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise TargetError(
            f"{path} does not exist: {path.parent} is no Hugging Face folder; mend target.source"
        ) from error
    except ValueError as error:
        raise TargetError(f"{path} is not JSON ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise TargetError(f"{path} holds no JSON object; fetch the model again")
    return content


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: nested in a multimodal wrapper, else all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def config_value(folder: Path, key: str) -> Any:
    """A value of the language model's config.

    Raises:
        TargetError: the config has no such key.
    """
    part = text_config(read_json(folder / CONFIG))
    if key not in part:
        raise TargetError(
            f"{folder / CONFIG} has no `{key}` (nor text_config.{key}); this architecture "
            "is not supported, or the file must be fetched again"
        )
    return part[key]


def architecture(config: dict[str, Any]) -> str:
    """The class that the config names, such as LlamaForCausalLM."""
    names = config.get("architectures") or text_config(config).get("architectures") or ["unknown"]
    return str(names[0])


def ships_code(folder: Path) -> str | None:
    """The file and key that ask for code from the model's repository, if any does."""
    for name in (CONFIG, "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        content = read_json(path)
        if "auto_map" in content or "auto_map" in text_config(content):
            return f"{path} (auto_map)"
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, by name.

    Raises:
        TargetError: there is none, or the index names one that is not there.
    """
    if (folder / SHARD_INDEX).is_file():
        names = sorted(set(weight_map(folder).values()))
        for name in names:
            if not (folder / name).is_file():
                raise TargetError(
                    f"{folder / SHARD_INDEX} names {name}, which is not there; fetch it again"
                )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise TargetError(
        f"{folder} has neither {SINGLE_FILE} nor {SHARD_INDEX}; "
        "point target.source at a model in safetensors format"
    )


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to shard file, from the index.

    Raises:
        TargetError: the index has no map.
    """
    index = read_json(folder / SHARD_INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise TargetError(f"{folder / SHARD_INDEX} has no `weight_map`; fetch it again")
    return names


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a safetensors file by its header; a tensor's bytes are read when it is asked for.

    Raises:
        TargetError: cut short, or no safetensors file.
    """
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise TargetError(f"{path} cannot be read ({error}); fetch it again") from error
    with file as tensors:
        yield tensors


def small_files(folder: Path) -> Iterator[Path]:
    """All files but the weights, in the order of their paths; hidden folders are left out."""
    found = {path for pattern in SMALL_FILES for path in folder.rglob(pattern)}
    for path in sorted(found):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        # Our own record is written beside the files that it vouches for.
        if path.is_file() and not hidden and str(inside) != TargetModel.manifest:
            yield path


def files_sha256(folder: Path) -> str:
    """Hash of config, tokenizer, template and code: what pins a folder that has no commit."""
    return fingerprint_of(
        {str(path.relative_to(folder)): file_sha256(path) for path in small_files(folder)}
    )


def weights_sha256(folder: Path, whole: bool) -> str:
    """Hash of the weights: of every byte, or of what tells models apart without reading terabytes.

    The short way takes each shard's size, its header (names, shapes, dtypes, places) and 1 MiB at
    the start, middle and end of its data: a fine-tuned model has the headers of its origin.
    """
    hashes = {}
    for path in weight_files(folder):
        with open_weights(path):
            hashes[path.name] = file_sha256(path) if whole else _sampled_sha256(path)
    return fingerprint_of(hashes)


def _sampled_sha256(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        # A safetensors file is the header's length (u64, little-endian), the header, the data.
        data_start = 8 + int.from_bytes(file.read(8), "little")
        digest = hashlib.sha256(f"{size}:".encode() + file.read(data_start - 8))
        for start in (data_start, (data_start + size) // 2, size - SAMPLE_BYTES):
            file.seek(max(start, data_start))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def trusted_folder(target: TargetModel, home: Path) -> Path:
    """The model's folder; where its code is to be run, only if that code is still what was pinned.

    Raises:
        ArtifactError: the folder is gone, or its files changed since the target stage.
    """
    folder = target.folder(home)
    if not folder.is_dir():
        raise ArtifactError(
            f"{home / target.manifest} points to {folder}, which is gone; "
            "run `dvc repro --force target`"
        )
    if target.trust_remote_code and files_sha256(folder) != target.files_sha256:
        raise ArtifactError(
            f"files in {folder} changed since the target stage, and target.trust_remote_code would "
            "run them; look at the change, then run `dvc repro --force target`"
        )
    return folder
