"""Rows as a source wrote them: files of chats, data sets of the hub, and what packages carry."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config import HuggingFaceSource, JsonlSource, Source
from eagle3.corpus.packaged import PACKAGED
from eagle3.errors import CorpusError


@dataclass(frozen=True)
class RawRow:
    """One row, before anybody has looked at what it says."""

    where: str
    record: Any
    fault: str | None
    """Why the row could not even be read; then there is no record."""


def read_source(source: Source) -> Iterator[RawRow]:
    """Read a source from its first row to its last.

    Raises:
        CorpusError: the source is not there.
    """
    if isinstance(source, JsonlSource):
        return read_jsonl(source.path)
    if isinstance(source, HuggingFaceSource):
        return read_hugging_face(source)
    records = PACKAGED[source.name]()
    return (RawRow(f"{source.name} row {i}", record, None) for i, record in enumerate(records, 1))


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """Read a file of one JSON object a line; blank lines are no rows.

    Raises:
        CorpusError: no such file.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read ({error.strerror}); mend corpus.sources[].path in params.yaml "
            "(relative paths start at the project's folder)"
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_row(line, f"{path} line {number}")


def _json_row(line: bytes, where: str) -> RawRow:
    try:
        return RawRow(where, json.loads(line.decode("utf-8-sig")), None)
    except UnicodeDecodeError as error:
        return RawRow(where, None, f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return RawRow(where, None, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return RawRow(where, None, "not JSON that can be read: nested too deep")


def read_hugging_face(source: HuggingFaceSource) -> Iterator[RawRow]:
    """Read a data set of the hub at a pinned revision.

    Raises:
        CorpusError: `datasets` is not installed.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise CorpusError(
            f"corpus.sources names the data set {source.name}, but the package `datasets` is not "
            "installed; run `pip install datasets`"
        ) from error
    rows = datasets.load_dataset(source.name, revision=source.revision, split=source.subset)
    for index, record in enumerate(rows):
        yield RawRow(f"{source.name} ({source.subset}) row {index + 1}", record, None)
