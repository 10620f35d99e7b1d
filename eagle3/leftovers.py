"""Work folders that no stage can go on from: what `eagle3 clean` removes.

A stage goes on from work on exactly its inputs and params. Each work folder notes both, so they are
compared with the records and params.yaml at hand.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import Artifact
from eagle3.config import Params
from eagle3.errors import ArtifactError
from eagle3.lineage import home_of, record_type
from eagle3.work import NOTE, WORK


@dataclass(frozen=True)
class WorkFolder:
    """One folder of unfinished work."""

    folder: Path
    bytes: int
    unusable: str
    """Why no stage can go on from it; empty if one can."""


def work_folders(params: Params, work: Path = WORK) -> list[WorkFolder]:
    """Every work folder, judged against these params and the results at hand."""
    if not work.exists():
        return []
    return [
        WorkFolder(folder, _size(folder), _why_unusable(folder, params))
        for folder in sorted(work.iterdir())
        if folder.is_dir()
    ]


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _why_unusable(folder: Path, params: Params) -> str:
    try:
        note = json.loads((folder / NOTE).read_text())
        stage, made_of = note["stage"], note["made_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"it has no readable {NOTE}"
    name, _, size = stage.partition("@")
    if size and size not in {str(known) for known in params.vocab.sizes}:
        return f"vocab.sizes has no {size}"
    sections = params.model_dump(mode="json")
    for key, value in made_of.items():
        record = record_type(key)
        if record is not None and isinstance(value, str):
            if not _is_current(record, size, value):
                return f"it was made from another {key}"
        elif isinstance(value, dict):
            section = name if key == "params" else key
            if not _agrees(value, sections.get(section, sections)):
                return f"params.yaml has other values in {section}"
    return ""


def _is_current(record: type[Artifact], size: str, fingerprint: str) -> bool:
    home = home_of(record, size)
    try:
        return record.load(home).fingerprint == fingerprint
    except ArtifactError:
        # Not here now, but DVC may bring the very same one back.
        return not home.exists()


def _agrees(noted: dict[str, Any], section: dict[str, Any]) -> bool:
    return all(section.get(key) == value for key, value in noted.items())
