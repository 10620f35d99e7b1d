"""Loss and gradient of one micro-batch, as `ttt.unroll` and `loss.head_loss` define them.

Shapes: N packed tokens, R rows of a step, M rows that count in it, S steps, H width, C columns of
queries, keys and values side by side, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.drafter import DrafterNet
from eagle3.hot.chain import Chains, Where, attend
from eagle3.hot.core import core_for
from eagle3.hot.fused import add_norm, norm, swiglu, take
from eagle3.hot.head import predict, score
from eagle3.hot.meet import Angles, Fed, Part, meet
from eagle3.hot.products import EVERY, Stack
from eagle3.loss import TargetHead
from eagle3.ttt import Batch, Step, plan_unrolling
from eagle3.vocab import VocabMaps


@dataclass(frozen=True)
class StepFigures:
    """Of each step of the training-time test."""

    nats_S: Tensor
    """Cross-entropy summed over rows, unweighted, float32 or wider."""
    hits_S: Tensor
    counted: tuple[int, ...]
    """Rows that count, also those whose target is outside the draft vocabulary."""


class HotPath:
    """The network's weights as the products read them, and the way through them."""

    def __init__(self, net: DrafterNet, dtype: torch.dtype) -> None:
        attention, mlp, width = net.midlayer.self_attn, net.midlayer.mlp, net.shape.hidden_size
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        gate_up = [mlp.gate_proj.weight, mlp.up_proj.weight]
        self.net, self.dtype = net, dtype
        self.fc = Stack([(net.fc.weight, EVERY)], dtype)
        self.embedding_qkv = Stack([(weight, slice(0, width)) for weight in qkv], dtype)
        self.hidden_qkv = Stack([(weight, slice(width, None)) for weight in qkv], dtype)
        self.o = Stack([(attention.o_proj.weight, EVERY)], dtype)
        self.gate_up = Stack([(weight, EVERY) for weight in gate_up], dtype)
        self.down = Stack([(mlp.down_proj.weight, EVERY)], dtype)
        self.head = Stack([(net.lm_head.weight, EVERY)], dtype)
        queries = net.shape.num_attention_heads * net.shape.head_dim
        keys = net.shape.num_key_value_heads * net.shape.head_dim
        self.query = Part(slice(0, queries), turns=True)
        self.key_value = (
            Part(slice(queries, queries + keys), turns=True),
            Part(slice(queries + keys, queries + 2 * keys), turns=False),
        )

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All of them."""
        layer = (self.embedding_qkv, self.hidden_qkv, self.o, self.gate_up, self.down)
        return (self.fc, *layer, self.head)

    def refresh(self) -> None:
        """Take over the network's weights: after every optimizer step."""
        for stack in self.stacks:
            stack.refresh()

    def backward(
        self,
        batch: Batch,
        embedding_VH: Tensor,
        target: TargetHead,
        maps: VocabMaps,
        step_weights: list[float],
    ) -> StepFigures:
        """Add the gradient of sum_i step_weights[i] * nats_i to the network's parameters."""
        steps_asked, device = len(step_weights), embedding_VH.device
        unrolling = plan_unrolling(batch.loss_mask_N.cpu(), batch.documents, steps_asked)
        steps = [step for step in unrolling.steps if len(step.rows_R)]
        counted = [len(step.counted_M) for step in unrolling.steps]
        if not steps:
            none = torch.zeros(steps_asked, device=device)
            return StepFigures(none, none.long(), tuple(counted))
        last_UH = batch.last_NH[unrolling.predictors_U.to(device)]
        prediction = predict(target, maps, last_UH, self.dtype)
        embedding_NH = embedding_VH[batch.tokens_N].to(self.dtype)
        state_MH = torch.cat(self._states(batch, embedding_NH, steps))
        hidden_MH = norm(state_MH, self.net.norm.weight, self.net.shape.rms_norm_eps)
        predictor_M = torch.cat([step.predictor_M for step in unrolling.steps]).to(device)
        step_M = torch.arange(steps_asked).repeat_interleave(torch.tensor(counted)).to(device)
        scores_dtype = torch.promote_types(self.dtype, torch.float32)
        weight_S = torch.tensor(step_weights, dtype=scores_dtype).to(device)
        scores = score(hidden_MH, self.head, prediction, predictor_M, weight_S[step_M])
        hidden_MH.backward(scores.grad_MH)
        for stack in self.stacks:
            stack.flush()
        nats_S = torch.zeros_like(weight_S).index_add_(0, step_M, scores.nats_M)
        hits_S = torch.zeros_like(step_M[:0].new_zeros(steps_asked))
        hits_S.index_add_(0, step_M, scores.hits_M.long())
        return StepFigures(nats_S, hits_S, tuple(counted))

    def _states(self, batch: Batch, embedding_NH: Tensor, steps: list[Step]) -> list[Tensor]:
        """States [M, H] of the rows that count, before the final norm, for each step."""
        net, device = self.net, embedding_NH.device
        layer, eps = net.midlayer, net.shape.rms_norm_eps
        positions_N = batch.documents.positions(device)
        features_NH = self.fc(batch.aux_N3H.flatten(1).to(self.dtype))
        embedded_NC = self.embedding_qkv(norm(embedding_NH, layer.input_layernorm.weight, eps))
        fed = Fed(embedded_NC)
        chains = Chains(len(steps), len(steps[1].rows_R) if len(steps) > 1 else 0)
        state_RH, place_R = features_NH, torch.empty(0, dtype=torch.int64, device=device)
        states = []
        for index, step in enumerate(steps):
            rows_R, kept_R = step.rows_R.to(device), step.kept_R.to(device)
            angles = self._angles(positions_N[rows_R] + index)
            token_R = rows_R + 1 + index
            core = core_for(step.rows_R, batch.documents, embedding_NH)
            if not index:
                normed_NH = norm(state_RH, layer.hidden_norm.weight, eps)
                key, value = self._first_keys(fed, normed_NH, positions_N)
                hidden_RC = self.hidden_qkv(take(normed_NH, kept_R), self.query.columns)
                (query,) = meet(fed, token_R, hidden_RC, angles, (self.query,))
                state_RH = take(state_RH, kept_R)
            else:
                state_RH = take(state_RH, kept_R)
                place_R = torch.arange(len(rows_R), device=device) if index == 1 else place_R[kept_R]
                hidden_RC = self.hidden_qkv(norm(state_RH, layer.hidden_norm.weight, eps))
                parts = (self.query, *self.key_value)
                query, key, value = meet(fed, token_R, hidden_RC, angles, parts)
            query, key, value = (self._heads(x) for x in (query, key, value))
            attended = attend(query, key, value, chains, Where(index, core, place_R))
            state_RH = self._finish(state_RH, attended)
            states.append(take(state_RH, step.counted_M.to(device)))
        return states

    def _first_keys(self, fed: Fed, normed_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of step 0, of every packed row."""
        columns = slice(self.key_value[0].columns.start, self.key_value[1].columns.stop)
        # The last row of a document has no next token and takes any: no row sees its key.
        next_N = torch.arange(1, len(positions_N) + 1, device=positions_N.device)
        next_N[-1] = 0
        hidden_NC = self.hidden_qkv(normed_NH, columns)
        return meet(fed, next_N, hidden_NC, self._angles(positions_N), self.key_value)

    def _finish(self, state_RH: Tensor, attended_RAE: Tensor) -> Tensor:
        """As `DraftLayer.finish`."""
        eps, weight_H = self.net.shape.rms_norm_eps, self.net.midlayer.post_attention_layernorm.weight
        total_RH, normed_RH = add_norm(state_RH, self.o(attended_RAE.flatten(1)), weight_H, eps)
        return total_RH + self.down(swiglu(self.gate_up(normed_RH)))

    def _angles(self, positions_R: Tensor) -> Angles:
        shape = self.net.shape
        return Angles.of(positions_R, shape.head_dim, shape.rope_theta, self.dtype)

    def _heads(self, x_RC: Tensor) -> Tensor:
        return x_RC.unflatten(1, (-1, self.net.shape.head_dim))
