"""The head over all steps' rows at once: loss, hits and gradient while a chunk of logits exists.

Shapes: U predicting positions, M rows that count (of all steps), C rows of a chunk, H width,
V target vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.config import Loss
from eagle3.hot.float8 import GRADIENT_CODES, UNIT, Float8Head, WeightGradient
from eagle3.hot.fused import compiled_on_gpu
from eagle3.hot.products import EVERY, Stack, add_gradient
from eagle3.loss import ROW_LOSSES, TargetHead, TargetPrediction, restrict

DRAFT_LOGITS_AT_ONCE = 2**29
"""1 GiB in bf16. Few chunks: each adds a whole head of float32 gradient to memory traffic."""

TARGET_LOGITS_AT_ONCE = 2**28
"""1 GiB in float32."""

ACCEPTANCE_LOGITS_AT_ONCE = 2**27
"""Losses without a kernel of their own hold several float32 copies, 0.5 GiB each."""


@dataclass(frozen=True)
class Scores:
    """What the head says about rows; rows that `TargetPrediction.scored` leaves out add nothing."""

    nats_M: Tensor
    """Loss, float32 or wider, not weighted; of `tv` a plain number."""
    hits_M: Tensor
    """bool: the drafter's argmax is the target's."""
    grad_MH: Tensor
    """Of the weighted sum, by the rows' normed states."""


@torch.no_grad()
def predict(
    head: TargetHead, ids_D: Tensor, to_draft_V: Tensor, last_UH: Tensor, loss: Loss
) -> TargetPrediction:
    """As `loss.predict_target`, with logits in float32 on a GPU and p kept in the head's dtype."""
    p_UD = head.head_VH.new_empty(len(last_UH), len(ids_D))
    choice_U = torch.empty(len(last_UH), dtype=torch.int64, device=last_UH.device)
    size = _rows_at_once(TARGET_LOGITS_AT_ONCE, len(to_draft_V))
    for start in range(0, len(last_UH), size):
        here = slice(start, start + size)
        normed_CH = F.rms_norm(
            last_UH[here].to(head.norm_H.dtype), head.norm_H.shape, head.norm_H, head.eps
        )
        logits_CV = _wide_product(normed_CH, head.head_VH)
        choice_U[here] = to_draft_V[logits_CV.argmax(dim=-1)]
        _put_restricted(logits_CV, ids_D, p_UD[here], loss)
    return TargetPrediction(p_UD, choice_U, loss)


@torch.no_grad()
def score(
    hidden_MH: Tensor,
    head: Stack | Float8Head,
    prediction: TargetPrediction,
    predictor_M: Tensor,
    weight_M: Tensor,
) -> Scores:
    """Score rows, and add the gradient of the weighted sum to the head's weight.

    Args:
        hidden_MH: states after the drafter's norm.
        head: the draft head.
        prediction: of the batch.
        predictor_M: each row's place among the target's predictions.
        weight_M: of each row in the sum, float32 or wider.
    """
    scored_M = prediction.scored(predictor_M)
    weight_M = weight_M * scored_M
    grad_MH = torch.empty_like(hidden_MH)
    ((parameter, _),) = head.parts
    gradient = None
    if isinstance(head, Float8Head) and parameter.requires_grad:
        gradient = WeightGradient(parameter, hidden_MH, weight_M)
    losses, hits = [], []
    most = DRAFT_LOGITS_AT_ONCE
    if prediction.loss != "cross_entropy":
        most = ACCEPTANCE_LOGITS_AT_ONCE
    for here in _chunks(len(hidden_MH), len(parameter), most):
        rows = (prediction, predictor_M[here], weight_M[here])
        if isinstance(head, Float8Head):
            chunk_loss, chunk_hits, unit_CD = _score_in_float8(hidden_MH[here], head, rows)
            grad_MH[here] = head.state_gradient(unit_CD, weight_M[here])
            if gradient:
                gradient.take(here, unit_CD)
        else:
            chunk_loss, chunk_hits = _score_chunk(hidden_MH[here], head, rows, grad_MH[here])
        losses.append(chunk_loss)
        hits.append(chunk_hits)
    if gradient:
        gradient.add()
    return Scores(torch.cat(losses) * scored_M, torch.cat(hits) & scored_M, grad_MH)


def _score_chunk(
    hidden_CH: Tensor,
    head: Stack,
    rows: tuple[TargetPrediction, Tensor, Tensor],
    grad_CH: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `row_losses`, from states; fills their gradient, and adds that of the head's weight."""
    ((parameter, _),) = head.parts
    logits_CD = hidden_CH @ head.weight_OI.T
    found = row_losses(logits_CD, *rows)
    torch.mm(logits_CD, head.weight_OI, out=grad_CH)
    if parameter.requires_grad:
        add_gradient(parameter, EVERY, logits_CD, hidden_CH)
    return found


def _score_in_float8(
    hidden_CH: Tensor, head: Float8Head, rows: tuple[TargetPrediction, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `row_losses`, from states, and what it puts into `unit_CD`."""
    logits_CD = head.logits(hidden_CH)
    unit_CD = torch.empty_like(logits_CD, dtype=GRADIENT_CODES)
    return *row_losses(logits_CD, *rows, unit_CD), unit_CD


def row_losses(
    logits_CD: Tensor,
    prediction: TargetPrediction,
    predictor_C: Tensor,
    weight_C: Tensor,
    unit_CD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and hits of rows, and their gradient.

    Args:
        logits_CD: the drafter's. The gradient of the weighted sum comes in their place; with
            `unit_CD` they are of no use afterwards.
        prediction: of the batch.
        predictor_C: each row's place among the target's predictions.
        weight_C: of each row in the sum.
        unit_CD: takes the gradient of the unweighted losses, times `float8.UNIT`.
    """
    p_UD, choice_U = prediction.p_UD, prediction.choice_U
    if prediction.loss == "cross_entropy":
        given = (p_UD, prediction.mass_U, choice_U, predictor_C, weight_C)
        return cross_entropy(logits_CD, *given, unit_CD)
    wide = torch.promote_types(logits_CD.dtype, torch.float32)
    grad_CD, p_CD = logits_CD.to(wide), p_UD[predictor_C].to(wide)
    highest_C1, drafted_C1 = grad_CD.max(dim=-1, keepdim=True)
    loss_C = ROW_LOSSES[prediction.loss](grad_CD, highest_C1, p_CD)
    _write(grad_CD, weight_C, logits_CD, unit_CD)
    return loss_C, drafted_C1[:, 0] == choice_U[predictor_C]


def cross_entropy(
    logits_CD: Tensor,
    p_UD: Tensor,
    mass_U: Tensor,
    choice_U: Tensor,
    predictor_C: Tensor,
    weight_C: Tensor,
    unit_CD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Nats and hits of rows, and their gradient: see `row_losses`.

    p may not sum to one exactly, since it is stored in a narrow dtype: the loss is
    sum p (log z - logit), which is small where p and the drafter agree, not log z - sum p logit.
    """
    if logits_CD.is_cuda:
        from eagle3.hot import kernels

        given = (p_UD, mass_U, choice_U, predictor_C, weight_C)
        return kernels.cross_entropy(logits_CD, *given, unit_CD)
    wide = torch.promote_types(logits_CD.dtype, torch.float32)
    logits, p_CD = logits_CD.to(wide), p_UD[predictor_C].to(wide)
    hits_C = logits.argmax(dim=-1) == choice_U[predictor_C]
    log_z_C1, mass_C1 = logits.logsumexp(-1, keepdim=True), mass_U[predictor_C, None]
    nats_C = (log_z_C1 * mass_C1)[:, 0] - (p_CD * logits).sum(-1)
    _write((logits - log_z_C1).exp() * mass_C1 - p_CD, weight_C, logits_CD, unit_CD)
    return nats_C, hits_C


def _write(grad_CD: Tensor, weight_C: Tensor, logits_CD: Tensor, unit_CD: Tensor | None) -> None:
    if unit_CD is None:
        logits_CD.copy_(grad_CD.mul_(weight_C[:, None]))
    else:
        unit_CD.copy_(grad_CD.mul_(UNIT))


@compiled_on_gpu
def _put_restricted(logits_CV: Tensor, ids_D: Tensor, p_CD: Tensor, loss: Loss) -> None:
    p_CD.copy_(restrict(logits_CV, ids_D, loss))


def _wide_product(x_CH: Tensor, weight_VH: Tensor) -> Tensor:
    if x_CH.is_cuda and x_CH.dtype != torch.float32:
        return torch.mm(x_CH, weight_VH.T, out_dtype=torch.float32)
    return x_CH @ weight_VH.T


def _chunks(rows: int, columns: int, logits: int) -> list[slice]:
    """Chunks of equal size, as far as tiles of 128 rows allow."""
    most = _rows_at_once(logits, columns)
    size = -(-rows // -(-rows // most) // 128) * 128 if rows else 1
    return [slice(start, start + size) for start in range(0, rows, size)]


def _rows_at_once(logits: int, columns: int) -> int:
    return max(1, logits // columns // 128 * 128) if logits >= 128 * columns else 1
