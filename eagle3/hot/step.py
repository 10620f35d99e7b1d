"""Loss and gradient of one micro-batch, as `ttt.unroll` and `loss.head_loss` define them.

Shapes: N packed tokens, R rows of a step, M rows that count in it, S steps, H width, C columns of
queries, keys and values side by side, V target vocabulary, A query heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eagle3.config import HeadProducts, Loss
from eagle3.drafter import DrafterNet
from eagle3.hot.chain import Chains, Where, attend
from eagle3.hot.core import core_for
from eagle3.hot.device import bring, bring_all
from eagle3.hot.float8 import Float8Head
from eagle3.hot.fused import arrange, swiglu, take
from eagle3.hot.head import predict, score
from eagle3.hot.meet import Angles, Fed, Part, meet
from eagle3.hot.norms import add_norm, norm
from eagle3.hot.products import EVERY, Stack
from eagle3.loss import TargetHead
from eagle3.maps import VocabMaps
from eagle3.ttt import Batch, Step, plan_unrolling


@dataclass(frozen=True)
class StepFigures:
    """Of each step of the training-time test."""

    nats_S: Tensor
    """Loss summed over rows, unweighted, float32 or wider; of `tv` a plain number."""
    hits_S: Tensor
    counted: tuple[int, ...]
    """Rows that count, also those whose target is outside the draft vocabulary."""


@dataclass(frozen=True)
class Plan:
    """`ttt.plan_unrolling`'s plan on the device, without steps that have no rows."""

    steps: tuple[Step, ...]
    predictors_U: Tensor
    order_M: Tensor
    """Of the rows of all steps that count, one step after the other: those of one predictor become
    neighbours, which read its probabilities while the cache has them."""
    predictor_M: Tensor
    """Of the rows in that order."""
    step_M: Tensor
    """The step of each of them."""
    counted: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch, steps: int, device: torch.device) -> "Plan":
        """Plan on the host, and bring all of it in one copy."""
        unrolling = plan_unrolling(batch.loss_mask_N.cpu(), batch.documents, steps)
        counted = torch.tensor([len(step.counted_M) for step in unrolling.steps])
        step_M = torch.arange(steps).repeat_interleave(counted)
        active = [step for step in unrolling.steps if len(step.rows_R)]
        parts = [(s.rows_R, s.kept_R, s.counted_M, s.predictor_M) for s in active]
        flat = [unrolling.predictors_U, step_M, *(tensor for part in parts for tensor in part)]
        predictors_U, step_M, *rest = bring_all(flat, device)
        brought = tuple(Step(*rest[at : at + 4]) for at in range(0, len(rest), 4))
        predictor_M = torch.cat([step.predictor_M for step in brought] or [step_M])
        order_M = predictor_M.argsort(stable=True)
        ordered = (order_M, predictor_M[order_M], step_M[order_M])
        return cls(brought, predictors_U, *ordered, tuple(counted.tolist()))


@dataclass(frozen=True)
class First:
    """What every step reads, of all packed tokens."""

    features_NH: Tensor
    normed_NH: Tensor
    fed: Fed
    positions_N: Tensor
    """Within documents."""
    key_NC: Tensor
    value_NC: Tensor


class HotPath:
    """The network's weights as the products read them, and the way through them."""

    def __init__(
        self,
        net: DrafterNet,
        embedding_VH: Tensor,
        target: TargetHead,
        maps: VocabMaps,
        loss: Loss = "cross_entropy",
        recompute: bool = False,
        head_products: HeadProducts = "dtype",
    ) -> None:
        """The products are made in the dtype of `embedding_VH`, the target's, on its device.

        With `head_products` float8, the draft head's are (float8.py).
        With `recompute`, all of a step but its attention is computed again in its backward pass.
        """
        dtype = embedding_VH.dtype
        attention, mlp, width = net.midlayer.self_attn, net.midlayer.mlp, net.shape.hidden_size
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        gate_up = [mlp.gate_proj.weight, mlp.up_proj.weight]
        self.net, self.dtype, self.device = net, dtype, embedding_VH.device
        self.embedding_VH, self.target, self.loss = embedding_VH, target, loss
        self.recompute = recompute
        self.ids_D, self.to_draft_V = maps.ids_D.to(self.device), maps.to_draft_V.to(self.device)
        self.fc = Stack([(net.fc.weight, EVERY)], dtype)
        self.embedding_qkv = Stack([(weight, slice(0, width)) for weight in qkv], dtype)
        self.hidden_qkv = Stack([(weight, slice(width, None)) for weight in qkv], dtype)
        self.o = Stack([(attention.o_proj.weight, EVERY)], dtype)
        self.gate_up = Stack([(weight, EVERY) for weight in gate_up], dtype)
        self.down = Stack([(mlp.down_proj.weight, EVERY)], dtype)
        self.head: Stack | Float8Head
        if head_products == "float8":
            self.head = Float8Head(net.lm_head.weight, dtype)
        else:
            self.head = Stack([(net.lm_head.weight, EVERY)], dtype)
        queries = net.shape.num_attention_heads * net.shape.head_dim
        keys = net.shape.num_key_value_heads * net.shape.head_dim
        self.query = Part(slice(0, queries), turns=True)
        self.key_value = (
            Part(slice(queries, queries + keys), turns=True),
            Part(slice(queries + keys, queries + 2 * keys), turns=False),
        )

    @property
    def stacks(self) -> tuple[Stack | Float8Head, ...]:
        """All of them."""
        layer = (self.embedding_qkv, self.hidden_qkv, self.o, self.gate_up, self.down)
        return (self.fc, *layer, self.head)

    def refresh(self) -> None:
        """Take over the network's weights: after every optimizer step."""
        for stack in self.stacks:
            stack.refresh()

    def take_over(self, parameter: Tensor, value_OI: Tensor) -> None:
        """Take over the value of one of the network's matrices, which is somewhere else."""
        for stack in self.stacks:
            stack.take_over(parameter, value_OI)

    def backward(self, batch: Batch, step_weights: list[float]) -> StepFigures:
        """Add the gradient of sum_i step_weights[i] * nats_i to the network's parameters."""
        wide = torch.promote_types(self.dtype, torch.float32)
        weight_S = bring(torch.tensor(step_weights, dtype=wide), self.device)
        # What needs no plan goes first: the device computes while the host plans.
        first = self._first(batch)
        plan = Plan.of(batch, len(step_weights), self.device)
        if not plan.steps:
            return StepFigures(weight_S * 0, torch.zeros_like(weight_S).long(), plan.counted)
        last_UH = batch.last_NH[plan.predictors_U]
        prediction = predict(self.target, self.ids_D, self.to_draft_V, last_UH, self.loss)
        hidden_MH = arrange(torch.cat(self._states(batch, first, plan.steps)), plan.order_M)
        if not self.net.shape.norm_output:
            hidden_MH = self._final_norm(hidden_MH)
        weight_M = weight_S[plan.step_M]
        scores = score(hidden_MH, self.head, prediction, plan.predictor_M, weight_M)
        hidden_MH.backward(scores.grad_MH)
        nats_S = torch.zeros_like(weight_S).index_add_(0, plan.step_M, scores.nats_M)
        hits_S = torch.zeros_like(weight_S).index_add_(0, plan.step_M, scores.hits_M.to(wide))
        return StepFigures(nats_S, hits_S.long(), plan.counted)

    def _first(self, batch: Batch) -> First:
        """Features, the embedding half of everything, and the keys and values of step 0."""
        layer, eps = self.net.midlayer, self.net.shape.rms_norm_eps
        features_NH = self.fc(self._fc_input(batch.aux_N3H.to(self.dtype)))
        embedding_NH = self.embedding_VH[batch.tokens_N]
        embedding_NH = norm(embedding_NH, layer.input_layernorm.weight, eps)
        fed = Fed(self.embedding_qkv(embedding_NH))
        normed_NH = norm(features_NH, layer.hidden_norm.weight, eps)
        positions_N = batch.documents.positions(self.device)
        # The last row of a document has no next token and takes any: no row sees its key.
        next_N = torch.arange(1, len(positions_N) + 1, device=self.device)
        next_N[-1:] = 0
        columns = slice(self.key_value[0].columns.start, self.key_value[1].columns.stop)
        hidden_NC = self.hidden_qkv(normed_NH, columns)
        key, value = meet(fed, next_N, hidden_NC, self._angles(positions_N), self.key_value)
        return First(features_NH, normed_NH, fed, positions_N, key, value)

    def _states(self, batch: Batch, first: First, steps: tuple[Step, ...]) -> list[Tensor]:
        """States [M, H] of the rows that count, as `DrafterNet.finish` gives them, of each step."""
        core = core_for(batch.documents, first.features_NH)
        chains = Chains(core, len(steps), len(steps[1].rows_R) if len(steps) > 1 else 0)
        state_RH, states = first.features_NH, []
        place_R = torch.arange(chains.rows, device=self.device)
        for index, step in enumerate(steps):
            angles = self._angles(first.positions_N[step.rows_R] + index)
            token_R = step.rows_R + 1 + index
            state_RH = take(state_RH, step.kept_R)
            if index:
                hidden_RC = self._again(self._hidden_half, state_RH)
                parts = (self.query, *self.key_value)
                query, key, value = meet(first.fed, token_R, hidden_RC, angles, parts)
            else:
                hidden_RC = self._again(self._query_half, first.normed_NH, step.kept_R)
                (query,) = meet(first.fed, token_R, hidden_RC, angles, (self.query,))
                key, value = first.key_NC, first.value_NC
            if index > 1:
                place_R = place_R[step.kept_R]
            query, key, value = (self._heads(x) for x in (query, key, value))
            attended = attend(query, key, value, chains, Where(index, step.rows_R, place_R))
            state_RH = self._again(self._finish, state_RH, attended, step.rows_R)
            states.append(take(state_RH, step.counted_M))
        return states

    def _again(self, piece: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a piece of a step; with `recompute` it keeps its inputs alone, and runs again later.

        A weight's gradient is added where its product goes backward, which happens once either way:
        the reentrant kind runs the first pass without autograd. `attend` and `meet` must stay
        outside: their forward passes leave traces (`Chains`, `Fed.pending`).
        """
        if not self.recompute:
            return piece(*inputs)
        # Nothing here is random, so no generator's state is kept.
        result: Tensor = checkpoint(piece, *inputs, use_reentrant=True, preserve_rng_state=False)
        return result

    def _hidden_half(self, state_RH: Tensor) -> Tensor:
        """W_h h of queries, keys and values: [R, C]."""
        weight_H, eps = self.net.midlayer.hidden_norm.weight, self.net.shape.rms_norm_eps
        return self.hidden_qkv(norm(state_RH, weight_H, eps))

    def _query_half(self, normed_NH: Tensor, rows_R: Tensor) -> Tensor:
        """W_h h of queries, for rows of step 0."""
        return self.hidden_qkv(take(normed_NH, rows_R), self.query.columns)

    def _finish(self, state_RH: Tensor, attended_NAE: Tensor, rows_R: Tensor) -> Tensor:
        """As `DrafterNet.finish`, for rows at these packed places of `attended`."""
        eps = self.net.shape.rms_norm_eps
        attended_RAE = take(attended_NAE, rows_R)
        weight_H = self.net.midlayer.post_attention_layernorm.weight
        total_RH, normed_RH = add_norm(state_RH, self.o(attended_RAE.flatten(1)), weight_H, eps)
        state_RH = total_RH + self.down(swiglu(self.gate_up(normed_RH)))
        return self._final_norm(state_RH) if self.net.shape.norm_output else state_RH

    def _final_norm(self, state_RH: Tensor) -> Tensor:
        return norm(state_RH, self.net.norm.weight, self.net.shape.rms_norm_eps)

    def _fc_input(self, aux_N3H: Tensor) -> Tensor:
        """The aux states side by side, each normed by itself if the network does: [N, 3H]."""
        if self.net.fc_norm is None:
            return aux_N3H.flatten(1)
        eps = self.net.shape.rms_norm_eps
        weights = [part.get_parameter("weight") for part in self.net.fc_norm]
        states = zip(aux_N3H.unbind(1), weights, strict=True)
        return torch.cat([norm(x.contiguous(), weight, eps) for x, weight in states], dim=1)

    def _angles(self, positions_R: Tensor) -> Angles:
        shape = self.net.shape
        return Angles.of(positions_R, shape.head_dim, shape.rope_theta, self.dtype)

    def _heads(self, x_RC: Tensor) -> Tensor:
        return x_RC.unflatten(1, (-1, self.net.shape.head_dim))
