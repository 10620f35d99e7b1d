"""The drafter's loss against the target's distribution on the draft vocabulary, and its gradient.

With q the drafter's softmax over the draft vocabulary and p the target's:

    cross_entropy   -sum p log q, with p renormalised over the draft vocabulary. Where the target's
                    own argmax lies outside, there is no loss: the drafter cannot say it.
    tv              1 - alpha, the total variation distance of p and q.
    lk_alpha        -log alpha. Its gradient is that of tv over alpha, so that it does not vanish
                    where p and q hardly meet; if p is one token, it is cross-entropy.

alpha = sum min(p, q) is the probability that rejection sampling accepts a token drafted from q.
There p is *not* renormalised: what the target says outside the draft vocabulary is never accepted,
and every supervised position counts.

Shapes: U predicting positions, M rows that count in a step, C rows of a chunk, H width, V target
vocabulary, D draft vocabulary.
Source: cross-entropy: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, eagle/traineagle3/cnets.py.
Total variation distance: DistillSpec, arXiv 2310.08461. LK losses: Samarin et al., arXiv
2602.23881, whose LK^alpha speculators calls nla, negative log-acceptance.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.config import Loss
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
    """As `restrict` gives it."""
    choice_U: Tensor
    """Draft id of the target's argmax over its whole vocabulary, or -1 where that is outside."""
    loss: Loss
    """What p is for."""

    @functools.cached_property
    def mass_U(self) -> Tensor:
        """Sums of p, float32 or wider: about one, as p is held in a narrow dtype."""
        wide = torch.promote_types(self.p_UD.dtype, torch.float32)
        return self.p_UD.sum(dim=-1, dtype=wide)

    def scored(self, predictor_M: Tensor) -> Tensor:
        """Which rows have a loss: bool [M]."""
        if self.loss == "cross_entropy":
            return self.choice_U[predictor_M] >= 0
        return torch.ones_like(predictor_M, dtype=torch.bool)


def restrict(logits_CV: Tensor, ids_D: Tensor, loss: Loss) -> Tensor:
    """The target's distribution on the draft vocabulary, [C, D]: for cross-entropy renormalised."""
    if len(ids_D) == logits_CV.shape[1]:
        return logits_CV.softmax(dim=-1)
    if loss == "cross_entropy":
        return logits_CV[:, ids_D].softmax(dim=-1)
    return logits_CV.softmax(dim=-1)[:, ids_D]


def predict_target(
    head: TargetHead, maps: VocabMaps, last_UH: Tensor, loss: Loss = "cross_entropy"
) -> TargetPrediction:
    """Compute the distribution once; all steps of the training-time test share it."""
    ids_D, to_draft_V = maps.ids_D.to(last_UH.device), maps.to_draft_V.to(last_UH.device)
    p, choice = [], []
    for rows_CH in last_UH.split(_rows_at_once(len(to_draft_V))):
        logits_CV = head.logits(rows_CH)
        choice.append(to_draft_V[logits_CV.argmax(dim=-1)])
        p.append(restrict(logits_CV, ids_D, loss))
    return TargetPrediction(torch.cat(p), torch.cat(choice), loss)


def cross_entropy(logits_CD: Tensor, highest_C1: Tensor, p_CD: Tensor) -> Tensor:
    """In nats, for p that sums to one: [C]. The gradient replaces the logits, in place.

    Args:
        logits_CD: the drafter's.
        highest_C1: the largest of each row.
        p_CD: the target's distribution.
    """
    agreement_C = torch.linalg.vecdot(p_CD, logits_CD)
    # In place, and not by logsumexp, which takes five times as long on two cores.
    exp_CD = logits_CD.sub_(highest_C1).exp_()
    z_C1 = exp_CD.sum(dim=-1, keepdim=True)
    # d/dlogits of (log z - p . logits) is softmax - p, since p sums to one.
    exp_CD.div_(z_C1).sub_(p_CD)
    return highest_C1[:, 0] + z_C1[:, 0].log() - agreement_C


def total_variation(logits_CD: Tensor, highest_C1: Tensor, p_CD: Tensor) -> Tensor:
    """1 - alpha, [C]. Arguments, and what becomes of the logits, as for `cross_entropy`."""
    alpha_C1 = _acceptance(logits_CD, highest_C1, p_CD)
    _drop_negligible(logits_CD.neg_())
    return 1 - alpha_C1[:, 0]


def negative_log_acceptance(logits_CD: Tensor, highest_C1: Tensor, p_CD: Tensor) -> Tensor:
    """-log alpha, [C]. Arguments, and what becomes of the logits, as for `cross_entropy`."""
    alpha_C1 = _acceptance(logits_CD, highest_C1, p_CD)
    # All of p can be too small for the dtype; the gradient is then zero, not undefined.
    alpha_C1 = alpha_C1.clamp(min=torch.finfo(alpha_C1.dtype).tiny)
    _drop_negligible(logits_CD.div_(-alpha_C1))
    return -alpha_C1[:, 0].log()


ROW_LOSSES: dict[Loss, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "lk_alpha": negative_log_acceptance,
    "tv": total_variation,
}


def _acceptance(logits_CD: Tensor, highest_C1: Tensor, p_CD: Tensor) -> Tensor:
    """alpha, [C, 1]; its gradient by the logits replaces them, in place."""
    q_CD = logits_CD.sub_(highest_C1).exp_()
    q_CD.div_(q_CD.sum(dim=-1, keepdim=True))
    alpha_C1 = torch.minimum(p_CD, q_CD).sum(dim=-1, keepdim=True)
    # Only tokens with q < p gain from a larger q; d q_j / d logit_i = q_j ([i = j] - q_i).
    gaining_CD = q_CD * (q_CD < p_CD)
    q_CD.mul_(-gaining_CD.sum(dim=-1, keepdim=True)).add_(gaining_CD)
    return alpha_C1


def _drop_negligible(grad_CD: Tensor) -> None:
    """Make gradients that are too small to change a sum of the others 0, in place.

    Those of alpha are products of two probabilities: times a state or a weight of the head, many
    fall below the normal float32 numbers, over which a processor takes many times as long
    (benchmarks/loss_cost.py). Cross-entropy's are differences of two, and seldom do.
    """
    if grad_CD.device.type == "cpu":
        eps = torch.finfo(torch.promote_types(grad_CD.dtype, torch.float32)).eps
        torch.hardshrink(grad_CD, eps**2, out=grad_CD)


def head_loss(
    hidden_MH: Tensor, weight_DH: Tensor, target: TargetPrediction, predictor_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of the drafter's loss over the rows, and how many argmaxes agree.

    Args:
        hidden_MH: states after the drafter's norm.
        weight_DH: the draft head.
        target: of the batch; it says which loss.
        predictor_M: each row's place among the target's predictions. Rows where the target's
            choice is outside the draft vocabulary never agree, and have no cross-entropy.
    """
    scored_M = target.scored(predictor_M)
    total, hits = _HeadLoss.apply(hidden_MH[scored_M], weight_DH, target, predictor_M[scored_M])
    return total, hits


class _HeadLoss(torch.autograd.Function):
    """Head, softmax, loss and their gradient, one chunk of rows after another.

    The gradient is taken in the forward pass, while a chunk's logits exist: [M, D] is never held.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_MH: Tensor,
        weight_DH: Tensor,
        target: TargetPrediction,
        predictor_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        reduction = torch.promote_types(weight_DH.dtype, torch.float32)
        total = hidden_MH.new_zeros((), dtype=reduction)
        hits = torch.zeros((), dtype=torch.int64, device=hidden_MH.device)
        grad_hidden_MH = torch.empty_like(hidden_MH)
        trained = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        grad_weight_DH = torch.zeros_like(weight_DH) if trained else None
        size = _rows_at_once(weight_DH.shape[0])
        for start in range(0, len(hidden_MH), size):
            here = slice(start, start + size)
            logits_CD = (hidden_MH[here] @ weight_DH.T).to(reduction)
            p_CD = target.p_UD[predictor_M[here]].to(reduction)
            highest_C1, drafted_C1 = logits_CD.max(dim=-1, keepdim=True)
            hits += (drafted_C1[:, 0] == target.choice_U[predictor_M[here]]).sum()
            total += ROW_LOSSES[target.loss](logits_CD, highest_C1, p_CD).sum()
            grad_CD = logits_CD.to(hidden_MH.dtype)
            grad_hidden_MH[here] = grad_CD @ weight_DH
            if grad_weight_DH is not None:
                grad_weight_DH += grad_CD.T @ hidden_MH[here]
        ctx.save_for_backward(grad_hidden_MH, grad_weight_DH)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden_MH, grad_weight_DH = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad_weight_DH is not None:
            grad_weight_DH = grad_weight_DH * grad_total
        return grad_hidden_MH * grad_total, grad_weight_DH, None, None


def _rows_at_once(columns: int) -> int:
    return max(1, LOGITS_AT_ONCE // columns)
