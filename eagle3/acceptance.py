"""Acceptance: how many drafted tokens the target takes, from tokens alone.

An eval row is a prompt and the target's own greedy answer, perhaps several. An answer is a span
[start, stop) of supervised positions. Drafting begins at row `start - 1`, the last prompt position:
it holds that position's feature, is fed the first answer token, which the target's prefill gave,
and drafts the second. A chain of k from row t proposes tokens t + 2 .. t + 1 + k. The target takes
the longest prefix that it would have written itself and adds one token of its own, so that the next
chain starts `accepted + 1` rows further on.

Shapes: P rows of one span that were drafted from, K draft steps, T tokens of an eval row,
V target vocabulary, D draft vocabulary, N tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """What became of a number of drafts of k tokens each; tallies of the same k add up."""

    k: int
    drafts: int
    accepted_at: tuple[int, ...]
    """Drafts of which at least the first i + 1 tokens were accepted, for i = 0 .. k - 1."""
    oov_misses: int
    """Drafts that ended at a token which the draft vocabulary does not hold."""

    @classmethod
    def empty(cls, k: int) -> Self:
        """No drafts yet."""
        return cls(k, 0, (0,) * k, 0)

    def __add__(self, other: "Tally") -> "Tally":
        assert self.k == other.k, "tallies of different k do not add up"
        accepted_at = tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True))
        return Tally(
            self.k, self.drafts + other.drafts, accepted_at, self.oov_misses + other.oov_misses
        )

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target took."""
        return sum(self.accepted_at)

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, the target's own token included; 1 if nothing was drafted."""
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Share of all drafts whose tokens 0 .. i were accepted: a joint probability, not a
        conditional one, so that the acceptance length is 1 plus their sum.
        """
        return tuple(count / max(self.drafts, 1) for count in self.accepted_at)

    @property
    def oov_miss_rate(self) -> float:
        """Share of all drafts whose first token that was not accepted stood where the answer has a
        token outside the draft vocabulary. A draft cut by the end of the answer is no such miss.
        """
        return self.oov_misses / max(self.drafts, 1)


def supervised_spans(loss_mask_T: BoolArray) -> list[slice]:
    """The answers of a row: each unbroken run of supervised positions."""
    padded = np.concatenate([[False], loss_mask_T, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def drafting_rows(span: slice) -> IntArray:
    """Every row that a walk through the answer may draft from: `start - 1 .. stop - 3`.

    From row `stop - 2` on, the row's next token is the answer's last and nothing is left to draft.
    An answer of one token has no such row.
    """
    assert span.start > 0, "an answer follows a prompt"
    return np.arange(span.start - 1, span.stop - 2, dtype=np.int64)


def matches(chains_PK: IntArray, tokens_T: IntArray, span: slice) -> BoolArray:
    """Whether each drafted token is the one the target wrote there; False past the answer's end.

    `chains_PK` holds target ids, one chain for each of `drafting_rows(span)`.
    """
    at_PK = drafting_rows(span)[:, None] + 2 + np.arange(chains_PK.shape[1])
    inside_PK = at_PK < span.stop
    return (tokens_T[np.minimum(at_PK, span.stop - 1)] == chains_PK) & inside_PK


def accepted_tokens(matches_PK: BoolArray, k: int) -> IntArray:
    """Length of the accepted prefix, [P], of chains of k: never a match after a miss."""
    return np.logical_and.accumulate(matches_PK[:, :k], axis=1).sum(axis=1)


def walk(accepted_P: IntArray) -> IntArray:
    """Which of the rows decoding really drafts from: each draft skips what it got accepted."""
    visited = []
    index = 0
    while index < len(accepted_P):
        visited.append(index)
        index += int(accepted_P[index]) + 1
    return np.array(visited, dtype=np.int64)


def tally_answer(
    chains_PK: IntArray, tokens_T: IntArray, span: slice, in_draft_V: BoolArray, k: int
) -> Tally:
    """Replay the decoding of one answer with drafts of k <= K tokens.

    `chains_PK` holds target ids, one chain for each of `drafting_rows(span)`: a chain of K begins
    with the chain of any smaller k, so one serves them all. `in_draft_V` is True for target ids
    that the draft vocabulary holds.
    """
    accepted_P = accepted_tokens(matches(chains_PK, tokens_T, span), k)
    visited = walk(accepted_P)
    accepted = accepted_P[visited]
    missed_at = drafting_rows(span)[visited] + 2 + accepted
    missed = (accepted < k) & (missed_at < span.stop)
    oov_misses = int((~in_draft_V[tokens_T[missed_at[missed]]]).sum())
    accepted_at = tuple(int((accepted > i).sum()) for i in range(k))
    return Tally(k, len(visited), accepted_at, oov_misses)


def sampled_acceptance(target_logits_NV: Tensor, draft_logits_ND: Tensor, ids_D: Tensor) -> Tensor:
    """Chance that rejection sampling at temperature 1 takes a token sampled from the drafter, [N].

    The sum over the draft vocabulary of min(p, q), with the target's p not renormalised to it: what
    the drafter cannot say counts against it. `ids_D` are the target ids of the draft vocabulary.

    Source: speculative sampling, arXiv 2211.17192, theorem 3.5.
    """
    p_ND = torch.softmax(target_logits_NV.float(), dim=-1)[:, ids_D]
    q_ND = torch.softmax(draft_logits_ND.float(), dim=-1)
    return torch.minimum(p_ND, q_ND).sum(dim=-1)


def projected_speedup(
    acceptance_length: float, k: int, draft_cost: float, verify_cost: float
) -> float:
    """Speed relative to plain decoding.

    `draft_cost` is one draft step, `verify_cost` the target's check of k + 1 tokens, both in
    plain target steps.
    """
    return acceptance_length / (verify_cost + k * draft_cost)
