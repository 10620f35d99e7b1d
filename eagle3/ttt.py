"""The training-time test: the drafter unrolled on its own states over a packed batch.

Row t at step i is fed token t+1+i and predicts token t+2+i; it counts if and only if both are
supervised. So the row on the last prompt token, fed the first answer token, counts. Tokens are
teacher-forced, states are the drafter's own.

A key of step i >= 1 is read by later steps of its own row alone. So a row that counts in no later
step is dropped, and a row that never counts only gives its key and value in step 0. This is exact.

Shapes: N packed tokens, R rows active in a step, M of them that count, U predicting positions
(u = t+1+i: token u and token u+1 are both supervised), H width, V target vocabulary.
Source: EAGLE-3, arXiv 2503.01840, section 3; the step's attention is described in attention.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3.attention import Chain, Documents, attend_chain
from eagle3.drafter import DrafterNet


@dataclass(frozen=True)
class Batch:
    """Whole rows of the corpus laid end to end, with the target's states."""

    tokens_N: Tensor
    """int64."""
    loss_mask_N: Tensor
    """bool, True on supervised tokens."""
    aux_N3H: Tensor
    last_NH: Tensor
    """Before the target's final norm."""
    documents: Documents

    def with_states_as(self, dtype: torch.dtype) -> "Batch":
        """The same batch with the aux states that the drafter reads in another dtype."""
        return replace(self, aux_N3H=self.aux_N3H.to(dtype))


@dataclass(frozen=True)
class Step:
    """Which rows one step computes and which of them count."""

    rows_R: Tensor
    """Packed row numbers, ascending."""
    kept_R: Tensor
    """Where each row stood among the rows of the step before (of all N rows, for step 0)."""
    counted_M: Tensor
    """Places in rows_R of the rows whose prediction counts."""
    predictor_M: Tensor
    """For each of them, the place in `Unrolling.predictors_U` of the token it is fed."""


@dataclass(frozen=True)
class Unrolling:
    """The rows of every step, and the positions where the target's own prediction is needed."""

    predictors_U: Tensor
    steps: tuple[Step, ...]


def supervised_predictors(loss_mask_N: Tensor, documents: Documents) -> Tensor:
    """Positions u whose token and next token are both supervised: bool [N].

    A row's prediction is scored there, so their number is the number of supervised predictions.
    The first token of a document is none: no row precedes it to be fed it.
    """
    predicts_N = torch.zeros_like(loss_mask_N)
    predicts_N[:-1] = loss_mask_N[:-1] & loss_mask_N[1:]
    edges = torch.tensor(documents.bounds, device=loss_mask_N.device)
    predicts_N[edges[1:] - 1] = False
    predicts_N[edges[:-1]] = False
    return predicts_N


def plan_unrolling(loss_mask_N: Tensor, documents: Documents, steps: int) -> Unrolling:
    """Work out which rows each step needs, from the loss mask alone."""
    predicts_N = supervised_predictors(loss_mask_N, documents)
    rank_N = predicts_N.long().cumsum(0) - 1
    counted = [_fed_from(predicts_N, documents, step) for step in range(steps)]
    needed_N = torch.zeros_like(predicts_N)
    active = []
    for counts_N in reversed(counted):
        needed_N = needed_N | counts_N
        active.append(needed_N)
    before_N = torch.ones_like(predicts_N)
    plan = []
    for step, (active_N, counts_N) in enumerate(zip(reversed(active), counted, strict=True)):
        rows_R = active_N.nonzero()[:, 0]
        counted_M = counts_N[rows_R].nonzero()[:, 0]
        plan.append(
            Step(
                rows_R=rows_R,
                kept_R=(before_N.long().cumsum(0) - 1)[rows_R],
                counted_M=counted_M,
                predictor_M=rank_N[rows_R[counted_M] + 1 + step],
            )
        )
        before_N = active_N
    return Unrolling(predicts_N.nonzero()[:, 0], tuple(plan))


def unroll(
    net: DrafterNet,
    batch: Batch,
    embedding_NH: Tensor,
    unrolling: Unrolling,
    recompute: bool = False,
) -> Iterator[tuple[Step, Tensor]]:
    """Yield each step with the states of its rows, [R, H], as `DrafterNet.finish` returns them.

    Args:
        net: the drafter.
        batch: its rows.
        embedding_NH: the target's embedding of the batch's tokens.
        unrolling: the plan for the batch.
        recompute: keep what enters a step alone, and run the step again in its backward pass.
    """
    positions_N = batch.documents.positions(embedding_NH.device)
    features_NH = net.fuse(batch.aux_N3H)
    embedded_NQE = net.embedding_half(embedding_NH)
    # The last row of a document has no next token. Its key is fed its own token instead, and no
    # row sees it: rows that draft lie before it, and attention is causal.
    next_N = torch.arange(len(positions_N), device=embedding_NH.device).add(1)
    next_N[-1] -= 1
    keys_NKE, values_NKE = net.key_value(embedded_NQE[next_N], features_NH, positions_N)

    def advance(index: int, step: Step, state_RH: Tensor, chain: Chain) -> tuple[Tensor, Chain]:
        state_RH, chain = state_RH[step.kept_R], chain.keep(step.kept_R)
        embedded_RQE = embedded_NQE[step.rows_R + 1 + index]
        positions_R = positions_N[step.rows_R] + index
        if index:
            key_RKE, value_RKE = net.key_value(embedded_RQE, state_RH, positions_R)
            chain = Chain([*chain.keys, key_RKE], [*chain.values, value_RKE])
        query_RAE = net.query(embedded_RQE, state_RH, positions_R)
        attended_RAE = attend_chain(
            query_RAE, keys_NKE, values_NKE, chain, step.rows_R, batch.documents
        )
        return net.finish(state_RH, attended_RAE), chain

    state_RH, chain = features_NH, Chain([], [])
    for index, step in enumerate(unrolling.steps):
        given = (index, step, state_RH, chain)
        if recompute:
            # Nothing here is random, so no generator's state is kept.
            state_RH, chain = checkpoint(
                advance, *given, use_reentrant=False, preserve_rng_state=False
            )
        else:
            state_RH, chain = advance(*given)
        yield step, state_RH


def _fed_from(predicts_N: Tensor, documents: Documents, step: int) -> Tensor:
    """Rows that are fed a predicting token at this step: row t is fed token t+1+step."""
    counts_N = torch.zeros_like(predicts_N)
    for start, stop in pairwise(documents.bounds):
        counts_N[start : max(start, stop - 1 - step)] = predicts_N[
            min(stop, start + 1 + step) : stop
        ]
    return counts_N
