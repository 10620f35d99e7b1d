"""What a record is: facts about a result, frozen, written last, and checked when read.

A record is written last, so a half-written folder has none. `made_from` names the records it was
made from by fingerprint, so a stale input is refused instead of reused.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.errors import ArtifactError
from eagle3.unfinished import unfinished


def fingerprint_of(value: Any) -> str:
    """Hash a JSON-like value: the same content gives the same 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hash a file's bytes without holding them in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = unfinished(path)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Artifact(BaseModel):
    """What a stage made. Subclasses say the stage, the folder and the facts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: ClassVar[str]
    manifest: ClassVar[str] = "manifest.json"

    made_from: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """Identity of this record and, through `made_from`, of all it was made from."""
        return fingerprint_of({"stage": self.stage, **self.model_dump(mode="json")})

    def save(self, folder: Path) -> None:
        """Write the record into the folder; the last act of making an artifact."""
        write_atomically(folder / self.manifest, self.model_dump_json(indent=2) + "\n")

    @property
    def figures(self) -> dict[str, float]:
        """The numbers that DVC's metrics and MLflow show of this artifact, by their one name."""
        return {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the record of a folder.

        Raises:
            ArtifactError: no record (the stage has not finished), or one of another version.
        """
        path = folder / cls.manifest
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{folder} has no {cls.manifest}: the stage has not finished there; "
                f"run `dvc repro {cls.stage}`"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise ArtifactError(
                f"{path} is not a record of this version of eagle3 ({error.error_count()} faults, "
                f"first: {first['loc']} {first['msg']}); run `dvc repro --force {cls.stage}`"
            ) from error

    def require_made_from(self, source: "Artifact", folder: Path) -> None:
        """Refuse this artifact if it was made from another `source` than the one at hand.

        Raises:
            ArtifactError: the fingerprints differ.
        """
        recorded = self.made_from.get(source.stage, "nothing")
        if recorded != source.fingerprint:
            raise ArtifactError(
                f"{folder} was made from {source.stage} {recorded[:12]}, but the {source.stage} "
                f"at hand is {source.fingerprint[:12]}; run `dvc repro {self.stage}`"
            )
