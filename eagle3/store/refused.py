"""Rows of which a state is no number at rest: none of their states is kept, and they are named.

Such a row's part of every array holds the bytes of a shard that is not there, which are no number
in any dtype, and the marker of each shard that it lies in names it.

Shapes: T tokens of a row, N tokens of some rows, H target width.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from eagle3.config import StateDtype
from eagle3.errors import StoreError
from eagle3.store.packing import WRITE_DTYPES

FLOAT8_ENDS = 1.9375 * 2.0**127
"""From here on a float32 rounds to a float8 that times its scale is no bfloat16."""


class Refused(BaseModel):
    """A row without states, and its first value that is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    row: str
    """Its id."""
    start: int
    stop: int
    """Its tokens in the store."""
    token: int
    """Of the first bad value, counted from the row's first."""
    layer: int | None
    """Of that value, in our convention; None for the last state."""

    def __str__(self) -> str:
        state = "last state" if self.layer is None else f"state of layer {self.layer}"
        return f"row {self.row} (from its token {self.token} on, {state})"


class RowsRead(NamedTuple):
    """States of some rows, one behind the other, as a reader gets them."""

    aux_N3H: Tensor
    last_NH: Tensor
    refused: tuple[int, ...]
    """Which of the rows, by their place among them, have zeros, since they were refused."""


class RefusedRows:
    """The refused rows of a store, by their tokens."""

    def __init__(self, rows: Iterable[Refused] = ()) -> None:
        """A row may be named several times, once by each of its shards."""
        by_id = {refused.row: refused for refused in rows}
        self._rows = sorted(by_id.values(), key=lambda refused: refused.start)
        self._ends = [refused.stop for refused in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Refused]:
        return iter(self._rows)

    def at(self, span: slice) -> Refused | None:
        """The first refused row that has a token in a range, which is not empty."""
        index = bisect_left(self._ends, span.start + 1)
        if index < len(self._rows) and self._rows[index].start < span.stop:
            return self._rows[index]
        return None

    def require_none(self, place: str, spans: Sequence[slice]) -> None:
        """Refuse to read ranges of the store at `place` in which a refused row lies.

        Raises:
            StoreError: there is one.
        """
        for refused in filter(None, map(self.at, spans)):
            raise StoreError(
                f"{place} has no states of {refused}: they were no numbers, and refused when they "
                "were made; leave the row out (`eagle3 store verify` names all such rows)"
            )


def in_write_dtype(
    dtype: StateDtype, aux_T3H: Tensor, last_TH: Tensor
) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
    """A row's states as a writer takes them, and where the first one is that is no number at rest.

    That is a token of the row, and 0 to 3 for an aux state or the last one; None if all are
    numbers. A float32 can be too large for bfloat16, or for the float8 that would be read as one.
    """
    aux_T3H, last_TH = aux_T3H.to(WRITE_DTYPES[dtype]), last_TH.to(WRITE_DTYPES[dtype])
    # A sum is not finite if a state is not, and takes a fifteenth of a look at each; in another
    # dtype than theirs, a third. It may be too large of many that are: they need a look.
    if dtype != "float8" and all(bool(states.sum().isfinite()) for states in (aux_T3H, last_TH)):
        return aux_T3H, last_TH, None
    good = [_are_numbers(dtype, states) for states in (aux_T3H, last_TH)]
    if all(bool(each.all()) for each in good):
        return aux_T3H, last_TH, None
    bad_T4 = ~torch.cat([good[0].all(dim=-1), good[1].all(dim=-1)[:, None]], dim=1)
    token, state = divmod(int(bad_T4.flatten().nonzero()[0]), 4)
    return aux_T3H, last_TH, (token, state)


def read_rows(
    refused: RefusedRows,
    read_spans: Callable[[Sequence[slice]], tuple[Tensor, Tensor]],
    spans: Sequence[slice],
) -> RowsRead:
    """Read whole rows, by their tokens, but those that were refused."""
    kept = [span for span in spans if refused.at(span) is None]
    aux_N3H, last_NH = read_spans(kept)
    if len(kept) == len(spans):
        return RowsRead(aux_N3H, last_NH, ())
    lengths = [span.stop - span.start for span in kept]
    rows = zip(aux_N3H.split(lengths), last_NH.split(lengths), strict=True)
    found = [None if refused.at(span) else next(rows) for span in spans]
    return zeros_for_refused(spans, found, last_NH.shape[1], last_NH.dtype)


def zeros_for_refused(
    spans: Sequence[slice],
    found: Sequence[tuple[Tensor, Tensor] | None],
    width: int,
    dtype: torch.dtype,
) -> RowsRead:
    """States of some rows laid end to end; zeros stand for the rows of which none were found.

    `width` is H.
    """
    rows = [
        states
        or (
            torch.zeros(span.stop - span.start, 3, width, dtype=dtype),
            torch.zeros(span.stop - span.start, width, dtype=dtype),
        )
        for span, states in zip(spans, found, strict=True)
    ]
    return RowsRead(
        torch.cat([aux_T3H for aux_T3H, _ in rows]),
        torch.cat([last_TH for _, last_TH in rows]),
        tuple(place for place, states in enumerate(found) if states is None),
    )


def _are_numbers(dtype: StateDtype, states: Tensor) -> Tensor:
    # Not a number is not below anything.
    return states.abs() < FLOAT8_ENDS if dtype == "float8" else torch.isfinite(states)
