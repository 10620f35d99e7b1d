"""How many rows of a split may go without states: `extract.max_nonfinite_rows`.

A row is refused when a state of it is no number (eagle3.store.refused). Counted by split, so that
it is the same whether a split is stored or streamed, and by one process or several.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from eagle3.artifacts import Split, write_atomically
from eagle3.errors import StoreError
from eagle3.store.refused import Refused, RefusedRows

log = logging.getLogger(__name__)

FOUND = TypeAdapter(dict[Split, dict[str, Refused]])

NAMED = 10
"""Rows that an error names; the log has all."""


class Refusals:
    """The rows refused so far, by split."""

    def __init__(self, limit: int, note: Path | None = None) -> None:
        """`limit` is extract.max_nonfinite_rows.

        `note` is a file that keeps them, where the shards that name them are deleted.
        """
        self.limit, self._note = limit, note
        self._found: dict[Split, dict[str, Refused]] = {}
        if note is not None and note.exists():
            self._found = FOUND.validate_json(note.read_bytes())

    def of(self, split: Split) -> RefusedRows:
        """Those of a split."""
        return RefusedRows(self._found.get(split, {}).values())

    def add(self, split: Split, refused: Iterable[Refused]) -> None:
        """Count rows, each once; two shards of a row both name it.

        Raises:
            StoreError: more than the limit allows, of which eval has none.
        """
        known = self._found.get(split, {})
        new = {row.row: row for row in refused if row.row not in known}
        for row in new.values():
            log.warning("refused, since a state of it is no number: %s %s", split, row)
        found = known | new
        if len(found) > (0 if split == "eval" else self.limit):
            raise StoreError(self._too_many(split, list(found.values())))
        self._found[split] = found
        if new and self._note is not None:
            write_atomically(self._note, FOUND.dump_json(self._found, indent=2).decode() + "\n")

    def _too_many(self, split: Split, found: list[Refused]) -> str:
        named = ", ".join(map(str, found[:NAMED]))
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        fix = (
            "set target.dtype and extract.state_dtype to float32, or leave the conversations out "
            "of corpus.sources"
        )
        if split == "eval":
            allowed = "eval may have none, since acceptance is measured on all of its rows"
            fix = fix.replace("extract.state_dtype", "extract.eval_state_dtype")
        else:
            allowed = f"extract.max_nonfinite_rows allows {self.limit}"
            fix += (
                f", or raise extract.max_nonfinite_rows to {len(found)} or more and run the same "
                "command again: finished shards are kept"
            )
        count = f"{len(found)} row{'s' if len(found) > 1 else ''}"
        return (
            f"{count} of {split} with states that are not finite, {allowed}: {named}{more}; {fix}"
        )
