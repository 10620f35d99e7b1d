"""The drafter's loss: cross-entropy against the target's distribution on the draft vocabulary.

The target's softmax is restricted to the draft vocabulary and renormalised. Where the target's own
argmax lies outside, there is no loss: the drafter cannot say it, and is not asked to.

Shapes: U predicting positions, M rows that count in a step, H width, V target vocabulary, D draft
vocabulary.
Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, eagle/traineagle3/cnets.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.maps import VocabMaps

LOGITS_AT_ONCE = 2**25
"""Logits held at a time (128 MiB in float32): rows are taken in chunks that keep below it."""


@dataclass(frozen=True)
class TargetHead:
    """What turns the target's last state into its next-token logits."""

    norm_H: Tensor
    eps: float
    head_VH: Tensor

    def logits(self, last_UH: Tensor) -> Tensor:
        """Logits of the target, [U, V], for states before the final norm."""
        normed_UH = F.rms_norm(
            last_UH.to(self.norm_H.dtype), self.norm_H.shape, self.norm_H, self.eps
        )
        return normed_UH @ self.head_VH.T


@dataclass(frozen=True)
class TargetPrediction:
    """What the target says at the predicting positions."""

    p_UD: Tensor
    """Softmax over the draft vocabulary."""
    choice_U: Tensor
    """Draft id of the target's argmax over its whole vocabulary, or -1 where that is outside."""


def predict_target(head: TargetHead, maps: VocabMaps, last_UH: Tensor) -> TargetPrediction:
    """Compute the distribution once; all steps of the training-time test share it."""
    ids_D, to_draft_V = maps.ids_D.to(last_UH.device), maps.to_draft_V.to(last_UH.device)
    whole = len(ids_D) == len(to_draft_V)
    p, choice = [], []
    for rows_CH in last_UH.split(_rows_at_once(len(to_draft_V))):
        logits_CV = head.logits(rows_CH)
        choice.append(to_draft_V[logits_CV.argmax(dim=-1)])
        logits_CD = logits_CV if whole else logits_CV[:, ids_D]
        p.append(logits_CD.softmax(dim=-1))
    return TargetPrediction(torch.cat(p), torch.cat(choice))


def head_loss(
    hidden_MH: Tensor, weight_DH: Tensor, target: TargetPrediction, predictor_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of the drafter's cross-entropy over the rows, in nats, and how many argmaxes agree.

    Args:
        hidden_MH: states after the drafter's norm.
        weight_DH: the draft head.
        target: of the batch.
        predictor_M: each row's place among the target's predictions. Rows where the target's
            choice is outside the draft vocabulary add nothing, to loss or agreement.
    """
    inside_M = target.choice_U[predictor_M] >= 0
    total, hits = _HeadLoss.apply(
        hidden_MH[inside_M], weight_DH, target.p_UD, target.choice_U, predictor_M[inside_M]
    )
    return total, hits


class _HeadLoss(torch.autograd.Function):
    """Head, softmax, cross-entropy and their gradient, one chunk of rows after another.

    The gradient is taken in the forward pass, while a chunk's logits exist: [M, D] is never held.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_MH: Tensor,
        weight_DH: Tensor,
        p_UD: Tensor,
        choice_U: Tensor,
        predictor_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        reduction = torch.promote_types(weight_DH.dtype, torch.float32)
        total = hidden_MH.new_zeros((), dtype=reduction)
        hits = torch.zeros((), dtype=torch.int64, device=hidden_MH.device)
        grad_hidden_MH = torch.empty_like(hidden_MH)
        grad_weight_DH = torch.zeros_like(weight_DH)
        size = _rows_at_once(weight_DH.shape[0])
        for start in range(0, len(hidden_MH), size):
            here = slice(start, start + size)
            logits_CD = (hidden_MH[here] @ weight_DH.T).to(reduction)
            p_CD = p_UD[predictor_M[here]].to(reduction)
            highest_C1, drafted_C1 = logits_CD.max(dim=-1, keepdim=True)
            hits += (drafted_C1[:, 0] == choice_U[predictor_M[here]]).sum()
            agreement_C = torch.linalg.vecdot(p_CD, logits_CD)
            # In place, and not by logsumexp, which takes five times as long on two cores.
            exp_CD = logits_CD.sub_(highest_C1).exp_()
            z_C1 = exp_CD.sum(dim=-1, keepdim=True)
            total += (highest_C1[:, 0] + z_C1[:, 0].log() - agreement_C).sum()
            # d/dlogits of (log z - p . logits) is softmax - p, since p sums to one.
            grad_CD = exp_CD.div_(z_C1).sub_(p_CD).to(hidden_MH.dtype)
            grad_hidden_MH[here] = grad_CD @ weight_DH
            grad_weight_DH += grad_CD.T @ hidden_MH[here]
        ctx.save_for_backward(grad_hidden_MH, grad_weight_DH)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_MH, grad_weight_DH = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_hidden_MH * grad_total, grad_weight_DH * grad_total, None, None, None


def _rows_at_once(columns: int) -> int:
    return max(1, LOGITS_AT_ONCE // columns)
