"""Checksums of a store's files, in records that carry their own: a flipped byte shows anywhere.

Two records lie in a store: one of the files that are written once, when the store is made
(`static.json`), and one per finished shard, its marker.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from eagle3.artifacts import file_sha256, fingerprint_of
from eagle3.errors import StoreError
from eagle3.store.place import Place
from eagle3.store.refused import Refused


class Seal(BaseModel):
    """What a finished file must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Seal":
        """The seal of a file as it is now."""
        return cls(bytes=path.stat().st_size, sha256=file_sha256(path))

    def size_fault(self, sizes: Mapping[str, int], name: str) -> str:
        """What the sizes of a store's files say is wrong with this one; empty if nothing."""
        found = sizes.get(name)
        if found is None:
            return "it is missing"
        return "" if found == self.bytes else f"it has {found} bytes of {self.bytes}"

    def fault(self, place: Place, sizes: Mapping[str, int], name: str) -> str:
        """What is wrong with the file, every byte read; empty if nothing."""
        if what := self.size_fault(sizes, name):
            return what
        found = place.sha256(name)
        if found == self.sha256:
            return ""
        return f"its sha256 is {found[:12]}, but {self.sha256[:12]} was written"


class SealRecord(BaseModel):
    """Seals of some files of a store, by path within it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, Seal]

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read a record.

        Raises:
            ValueError: a byte of it is not as `content` had it.
        """
        text = content.decode()
        facts = json.loads(text)
        if isinstance(facts, dict):
            facts.pop("sha256", None)
        record = cls.model_validate(facts)
        # Whatever changed, the text of what was read then differs: in a value, in the hash over
        # all values, or in a blank between two of them.
        if record._text() != text:
            raise ValueError("it does not have the sha256 that it names")
        return record

    @property
    def content(self) -> bytes:
        """The record as it lies in its file."""
        return self._text().encode()

    def _text(self) -> str:
        facts: dict[str, Any] = self.model_dump(mode="json")
        return json.dumps({**facts, "sha256": fingerprint_of(facts)}, indent=2) + "\n"


class StaticFiles(SealRecord):
    """The files that a store is made with: descriptions of its arrays, and its rows."""


class Marker(SealRecord):
    """A finished shard: its files are durable, and these."""

    start: int
    stop: int
    token_ids_sha256: str
    """Of the ids that the states belong to, as little-endian int32."""
    refused: tuple[Refused, ...]
    """Rows with tokens in the shard that have no states."""


def damaged(file: str, what: str) -> StoreError:
    """The error of a file, by path or URL, whose store can be made again."""
    return StoreError(f"{file} is damaged: {what}; run `dvc repro --force extract`")
