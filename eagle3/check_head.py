"""Whether a draft head was trained: what can be proven from its rows, alone or beside the target's.

A head of independent random values has rows that point nowhere together: over M rows of width H,
the mean of H x cosine^2 is 1, give or take 2 / M. Training turns rows towards each other, so a
trained head lies far above (SmolLM2's own: 125 over 2,048 rows, where 6 deviations are 1.006). A
head near 1 is called random, unless its rows follow the target's: then that is what is random.

Letters: D draft vocabulary, V target vocabulary, H width, M sampled rows.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eagle3.fault import Fault
from eagle3.target_facts import TargetFacts

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

SAMPLED_ROWS = 2048
PLACED_ROWS = 256
DEVIATIONS = 6.0
"""Standard deviations above chance that count as proof: less than one false alarm in a billion."""

REPEATED_SHARE = 0.01
"""Rows that may repeat others where the target is not at hand: unused tokens of a target often
share one row (SmolLM2: 11 of 49,152), and training keeps equal rows equal."""

CLEAR_MATCH = 0.5
"""Cosine with some row of the target from which a draft row is plainly that row, trained on."""


def head_faults(
    where: str, head_DH: Floats, ids_D: Ids, target: TargetFacts | None
) -> Iterator[Fault]:
    """Name what is wrong with a head's values; `ids_D` are the target ids of its rows."""
    if not head_DH.any():
        yield Fault(
            where, "is all zero: it drafts token 0 always", "export the trained weights again"
        )
        return
    yield from _repeated_rows(where, head_DH, ids_D, target)
    sample = np.linspace(0, len(head_DH) - 1, min(SAMPLED_ROWS, len(head_DH))).astype(np.int64)
    # The mean of all values is taken off, so that random values of any one sign are random too.
    rows_MH = _directions(head_DH[sample] - head_DH.mean(dtype=np.float64).astype(np.float32))
    follows = False
    if target is not None and target.head is not None:
        target_MH = _directions(target.head_rows(ids_D[sample]))
        follows = _follows(rows_MH, target_MH)
        yield from _misplaced(where, head_DH, ids_D, target)
    spread = spread_of(rows_MH)
    if not follows and (spread - 1) * len(rows_MH) / 2 < DEVIATIONS:
        yield Fault(
            where,
            "looks random: its rows are as unrelated as chance makes them (H x cosine^2 is "
            f"{spread:.3f} on average, chance gives 1)",
            "the head was not saved or not trained: export the drafter again; if its target is "
            "random too, pass --target",
        )


def spread_of(rows_MH: Floats) -> float:
    """Mean of H x cosine^2 over all pairs of unit rows: 1 for independent random rows."""
    count, width = rows_MH.shape
    if count < 2:
        return float(width)
    cosines_MM = rows_MH @ rows_MH.T
    return float((np.sum(cosines_MM**2, dtype=np.float64) - count) / (count * (count - 1)) * width)


def _follows(rows_MH: Floats, target_MH: Floats) -> bool:
    """Whether rows follow the target's rows, one by one or in how they lie to each other."""
    count, width = rows_MH.shape
    one_by_one = np.sum(rows_MH * target_MH, dtype=np.float64) / np.sqrt(count) * np.sqrt(width)
    # The second way does not depend on the basis, which a head trained from scratch makes its own.
    own_MM, other_MM = rows_MH @ rows_MH.T, target_MH @ target_MH.T
    np.fill_diagonal(own_MM, 0)
    np.fill_diagonal(other_MM, 0)
    scale = np.sqrt(2 * np.sum(other_MM**2, dtype=np.float64) / width)
    together = np.sum(own_MM * other_MM, dtype=np.float64) / scale if scale else 0.0
    return bool(max(one_by_one, together) > DEVIATIONS)


def _misplaced(where: str, head_DH: Floats, ids_D: Ids, target: TargetFacts) -> Iterator[Fault]:
    # A head grown from the target's rows must sit at its own ids: maps that are one off show here.
    sample = np.linspace(0, len(head_DH) - 1, min(PLACED_ROWS, len(head_DH))).astype(np.int64)
    rows_MH = _directions(head_DH[sample])
    best_M = np.full(len(sample), -1.0, dtype=np.float32)
    for start in range(0, target.vocab_size, SAMPLED_ROWS):
        block = _directions(target.head_rows(slice(start, start + SAMPLED_ROWS)))
        best_M = np.maximum(best_M, (rows_MH @ block.T).max(axis=1))
    own_M = np.sum(rows_MH * _directions(target.head_rows(ids_D[sample])), axis=1)
    # Equal rows of the target tie; a tie is no sign of a wrong place.
    elsewhere_M = (best_M > CLEAR_MATCH) & (own_M < best_M - 1e-3)
    if 2 * int(elsewhere_M.sum()) > len(sample):
        yield Fault(
            where,
            f"does not sit at its ids: {int(elsewhere_M.sum())} of {len(sample)} sampled rows are "
            "rows of the target, but of other tokens than d2t says",
            "write the d2t that the head was trained with",
        )


def _repeated_rows(
    where: str, head_DH: Floats, ids_D: Ids, target: TargetFacts | None
) -> Iterator[Fault]:
    as_bytes_D = (
        np.ascontiguousarray(head_DH).view([("", head_DH.dtype)] * head_DH.shape[1]).ravel()
    )
    _, first, group_D = np.unique(as_bytes_D, return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[group_D] != np.arange(len(head_DH)))
    if not len(repeats):
        return
    if target is not None and target.head is not None:
        own = _directions(target.head_rows(ids_D[repeats]))
        originals = _directions(target.head_rows(ids_D[first[group_D[repeats]]]))
        repeats = repeats[np.sum(own * originals, axis=1) < 1 - 1e-3]
        allowed = 0
    else:
        allowed = int(REPEATED_SHARE * len(head_DH))
    if len(repeats) > allowed:
        yield Fault(
            where,
            f"has {len(repeats)} of {len(head_DH)} rows that repeat another row (first: row "
            f"{repeats[0]} is row {first[group_D[repeats[0]]]})",
            "export the trained weights again; each draft token needs its own row",
        )


def _directions(rows_MH: Floats) -> Floats:
    lengths = np.linalg.norm(rows_MH, axis=1, keepdims=True)
    return rows_MH / np.maximum(lengths, np.finfo(np.float32).tiny)
