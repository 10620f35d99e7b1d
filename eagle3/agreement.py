"""Do replay, the real loop and plain greedy decoding tell one story? What differs is listed.

In exact arithmetic all three give the same tokens. In floating point one pass over a row and many
small steps round differently, so where the two best logits all but tie, either may win; every
difference is therefore listed with the gap at which it arose.

Shapes: T tokens of an eval row, V target vocabulary, H target width, N answer tokens.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3.acceptance import Tally
from eagle3.generate import Draft, Generation

log = logging.getLogger(__name__)

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Answer:
    """One answer of an eval row, as stored and as drafter and target wrote it together."""

    row_id: str
    span: slice
    tokens: list[int]
    """The whole row's: prompt, and the target's own greedy text."""
    generated: Generation

    @property
    def stored(self) -> list[int]:
        """The answer's tokens in the row."""
        return self.tokens[self.span]


@dataclass(frozen=True)
class TextDifference:
    """The first token at which the loop's text leaves the stored greedy text."""

    row_id: str
    position: int
    """In the row."""
    greedy_token: int | None
    """None: the stored text ends here."""
    loop_token: int | None
    gap: float
    """Top-2 gap of the target's logits in the loop."""
    near_tie: bool
    loop_equals_single_row_greedy: bool
    """Whether the target, alone and with this prompt alone, writes what the loop wrote. The stored
    text was written in a batch, padded, which rounds differently."""


@dataclass(frozen=True)
class CountDifference:
    """A row of which replay and loop count drafts or accepted tokens differently."""

    row_id: str
    replay_drafts: int
    replay_accepted_at: tuple[int, ...]
    loop_drafts: int
    loop_accepted_at: tuple[int, ...]
    drafted_from: int | None
    """The first position whose chains differ; None where chains are the same and walks are not."""
    replay_chain: tuple[int, ...]
    loop_chain: tuple[int, ...]
    gap: float | None
    """Top-2 gap of the drafter's logits at the first token that differs."""
    near_tie: bool
    """Either model's: a text that differs at one makes the counts differ, too."""


def text_difference(
    answer: Answer, near_tie: float, write_plainly: Callable[[Answer], list[int]]
) -> TextDifference | None:
    """Compare the loop's text with the stored one; `write_plainly` is asked only if they differ."""
    loop = answer.generated.tokens
    if loop == answer.stored:
        return None
    index = _first_difference(answer.stored, loop)
    # Where the loop stopped early, its last token is where it thought otherwise.
    gap = answer.generated.gaps[min(index, len(loop) - 1)]
    return TextDifference(
        row_id=answer.row_id,
        position=answer.span.start + index,
        greedy_token=answer.stored[index] if index < len(answer.stored) else None,
        loop_token=loop[index] if index < len(loop) else None,
        gap=gap,
        near_tie=gap < near_tie,
        loop_equals_single_row_greedy=write_plainly(answer) == loop,
    )


def count_difference(
    row_id: str,
    replay: Tally,
    loop: Tally,
    drafts: Sequence[Draft],
    replay_chain: Callable[[int], Sequence[int]],
    near_tie: float,
    text_near_tie: bool,
) -> CountDifference | None:
    """Compare the counts of a row; `replay_chain` gives the replayed chain of a row's position."""
    if (replay.drafts, replay.accepted_at) == (loop.drafts, loop.accepted_at):
        return None
    found: dict[str, Any] = {
        "drafted_from": None,
        "replay_chain": (),
        "loop_chain": (),
        "gap": None,
    }
    for draft in drafts:
        chain = tuple(replay_chain(draft.row))
        if chain != draft.proposed:
            index = _first_difference(chain, draft.proposed)
            found = {"drafted_from": draft.row, "replay_chain": chain}
            found |= {"loop_chain": draft.proposed, "gap": draft.gaps[index]}
            break
    drafter_near_tie = found["gap"] is not None and found["gap"] < near_tie
    return CountDifference(
        row_id=row_id,
        replay_drafts=replay.drafts,
        replay_accepted_at=replay.accepted_at,
        loop_drafts=loop.drafts,
        loop_accepted_at=loop.accepted_at,
        near_tie=drafter_near_tie or text_near_tie,
        **found,
    )


def close_calls(
    row_id: str, tokens_T: IntArray, span: slice, logits_NV: Tensor, near_tie: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Look for near-ties in a stored answer, and for tokens that are not the target's choice.

    `logits_NV` are those of the positions before each answer token, from the stored states. A token
    that is not the likeliest has no place in a greedy text, unless at a near-tie.

    Returns:
        Near-ties, and tokens that were not the likeliest; each as row id, position, written token,
        the two likeliest tokens and their gap.
    """
    values_N2, ids_N2 = logits_NV.topk(2)
    gaps_N = values_N2[:, 0] - values_N2[:, 1]
    written_N = torch.from_numpy(tokens_T[span]).to(ids_N2.device)
    near, strange = [], []
    for index in (
        torch.nonzero((gaps_N < near_tie) | (ids_N2[:, 0] != written_N)).flatten().tolist()
    ):
        call = {
            "row_id": row_id,
            "position": span.start + index,
            "token": int(written_N[index]),
            "tokens": ids_N2[index].tolist(),
            "gap": gaps_N[index].item(),
        }
        if call["gap"] < near_tie:
            near.append(call)
        if call["token"] != call["tokens"][0]:
            strange.append(call)
    return near, strange


def warn_of(difference: TextDifference | CountDifference) -> None:
    """Say loudly what a near-tie does not explain, and quietly what it does."""
    what = "text" if isinstance(difference, TextDifference) else "counts"
    cause = "at a near-tie" if difference.near_tie else "WITHOUT a near-tie: one of them is wrong"
    level = logging.INFO if difference.near_tie else logging.WARNING
    log.log(level, "loop and replay differ in %s, %s: %s", what, cause, asdict(difference))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
