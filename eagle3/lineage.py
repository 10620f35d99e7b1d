"""What a path is, what it holds, and what it was made from, back to the target."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3.artifacts import (
    Artifact,
    Corpus,
    Decision,
    Drafter,
    DraftVocab,
    Evaluation,
    HiddenStates,
    Serving,
    TargetModel,
)
from eagle3.config import parse_size
from eagle3.contract import CONFIG_FILE, LAYER_IDS, SIZES, WEIGHTS_FILE
from eagle3.errors import ArtifactError
from eagle3.store.pointer import POINTER
from eagle3.weights_file import WeightsFile

RECORDS: tuple[type[Artifact], ...] = (
    TargetModel,
    Corpus,
    HiddenStates,
    DraftVocab,
    Drafter,
    Evaluation,
    Serving,
    Decision,
)
"""Every kind of record, in the order of the stages."""


@dataclass(frozen=True)
class Source:
    """One artifact that another was made from, and whether it is still the one at hand."""

    stage: str
    home: Path
    fingerprint: str
    state: Literal["the same", "another", "missing"]
    """What lies in `home` now, compared with what the artifact was made from."""


@dataclass(frozen=True)
class Description:
    """What `eagle3 inspect` answers."""

    path: Path
    kind: str
    """The stage that makes it, or what else it is."""
    fingerprint: str
    """Empty where nothing says it."""
    holds: dict[str, Any]
    made_from: tuple[Source, ...]


def record_type(stage: str) -> type[Artifact] | None:
    """The record of a stage's result; None if no stage is called so."""
    return next((record for record in RECORDS if record.stage == stage), None)


def home_of(record: type[Artifact], size: str) -> Path:
    """Where the result of a stage lies; `size` matters for stages that exist once a size."""
    # A ClassVar path, or a static method of the size: see artifacts.py.
    home: Path | Callable[[Any], Path] = getattr(record, "home")  # noqa: B009
    return home if isinstance(home, Path) else home(parse_size(size))


def find_record(path: Path) -> Artifact | None:
    """Read the record of a folder, or the record that a file is; None if there is none.

    Raises:
        ArtifactError: there is one, but not of this version of eagle3.
    """
    manifests = {record.manifest for record in RECORDS}
    folder = path.parent if path.name in manifests else path
    found = [record for record in RECORDS if (folder / record.manifest).is_file()]
    for record in found:
        try:
            # Records are closed, so at most one kind fits.
            return record.load(folder)
        except ArtifactError:
            continue
    if found:
        raise ArtifactError(
            f"{folder / found[0].manifest} is no record of this version of eagle3; run the stage "
            "that makes it again with `dvc repro --force`"
        )
    return None


def sources(record: Artifact) -> list[Source]:
    """What a record was made from, and what those were made from; each once, nearest first."""
    found: dict[str, Source] = {}
    waiting = [record]
    while waiting:
        current = waiting.pop(0)
        own_size = str(getattr(current, "size", ""))
        for name, fingerprint in current.made_from.items():
            stage, _, size = name.partition("@")
            made_from = record_type(stage)
            if made_from is None or fingerprint in found:
                continue
            home = home_of(made_from, size or own_size)
            known = _load(made_from, home)
            state = _state(known, fingerprint)
            found[fingerprint] = Source(name, home, fingerprint, state)
            # Another result's own sources say nothing about this one's.
            if known is not None and state == "the same":
                waiting.append(known)
    return list(found.values())


def _load(record: type[Artifact], home: Path) -> Artifact | None:
    try:
        return record.load(home)
    except ArtifactError:
        return None


def _state(known: Artifact | None, fingerprint: str) -> Literal["the same", "another", "missing"]:
    if known is None:
        return "missing"
    return "the same" if known.fingerprint == fingerprint else "another"


def describe(path: Path) -> Description:
    """Say what a path is: a stage's result, a Zarr store, or a drafter without a record.

    Raises:
        ArtifactError: nothing that eagle3 makes, or made by another version.
    """
    record = find_record(path)
    if record is not None:
        facts = json.loads(record.model_dump_json(exclude={"made_from"}))
        return Description(path, record.stage, record.fingerprint, facts, tuple(sources(record)))
    if (path / "zarr.json").is_file() or (path / POINTER).is_file():
        return _describe_store(path)
    if (path / CONFIG_FILE).is_file() and (path / WEIGHTS_FILE).is_file():
        return Description(path, "drafter without a record", "", _drafter_facts(path), ())
    raise ArtifactError(
        f"{path} is nothing that eagle3 makes; name a folder with one of "
        f"{', '.join(sorted({r.manifest for r in RECORDS}))}, a .zarr store, or a drafter's folder "
        f"({CONFIG_FILE} and {WEIGHTS_FILE})"
    )


def _describe_store(path: Path) -> Description:
    # Late: only this answer needs zarr and torch, which take seconds to load.
    from eagle3.store.rows import load_rows, rows_sha256
    from eagle3.store.states import StateStore

    if not (path / "tokens").is_dir():
        store = StateStore.open(path)
        facts = {**store.header.model_dump(mode="json"), **asdict(store.info)}
        return Description(path, "hidden states", store.info.fingerprint, facts, ())
    rows = load_rows(path)
    facts = {
        "rows": len(rows),
        "tokens": rows.num_tokens,
        "supervised_tokens": int(rows.loss_mask_N.sum()),
        "domains": dict(Counter(rows.domains)),
    }
    return Description(path, "rows of tokens", rows_sha256(rows), facts, ())


def _drafter_facts(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError as error:
        raise ArtifactError(
            f"{folder / CONFIG_FILE} is not JSON: {error}; copy it again"
        ) from error
    named = ("architectures", *SIZES, LAYER_IDS)
    facts = {key: config[key] for key in named if key in config}
    entries = WeightsFile(folder / WEIGHTS_FILE).entries
    tensors = {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in entries.items()}
    return {**facts, "tensors": tensors}
