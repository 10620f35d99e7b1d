"""The training-time test against an independent, slow reference in float64.

The reference shares no code with the product: explicit loops over documents, rows and steps, whole
weight matrices, one softmax per row, and the gradient by autograd.
"""

import math

import pytest
import torch
from torch import Tensor
from toy_batches import toy_batch
from toys import SHAPES, TOY_SHAPE

from eagle3.attention import Documents
from eagle3.drafter import DrafterNet
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.maps import VocabMaps
from eagle3.ttt import Batch, plan_unrolling, supervised_predictors, unroll

STEPS, DECAY = 4, 0.8


def product_loss(
    net: DrafterNet, batch: Batch, embedding_VH: Tensor, head: TargetHead, maps: VocabMaps
) -> tuple[Tensor, list[int], int]:
    unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, STEPS)
    prediction = predict_target(head, maps, batch.last_NH[unrolling.predictors_U])
    total, hits = torch.zeros((), dtype=torch.float64), []
    steps = unroll(net, batch, embedding_VH[batch.tokens_N], unrolling)
    for index, (step, state) in enumerate(steps):
        hidden = net.head_input(state[step.counted_M])
        nats, agreed = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
        total = total + DECAY**index * nats
        hits.append(int(agreed))
    count = int(supervised_predictors(batch.loss_mask_N, batch.documents).sum())
    return total / count, hits, count


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate one head vector, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * 100.0 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out = out.index_put((torch.tensor(i),), x[i] * cos - x[i + half] * sin)
        out = out.index_put((torch.tensor(i + half),), x[i + half] * cos + x[i] * sin)
    return out


def fc_input(net: DrafterNet, aux_3H: Tensor) -> Tensor:
    if not net.shape.fc_norm:
        return aux_3H.reshape(-1)
    w = dict(net.named_parameters())
    return torch.cat([rms(aux_3H[i], w[f"fc_norm.{i}.weight"]) for i in range(3)])


def reference_loss(
    net: DrafterNet, batch: Batch, embedding_VH: Tensor, head: TargetHead, maps: VocabMaps
) -> tuple[Tensor, list[int], int]:
    w = dict(net.named_parameters())
    layer, attn = "midlayer.", "midlayer.self_attn."
    ids = [i + int(offset) for i, offset in enumerate(maps.d2t_D)]
    heads, kv, width = (
        TOY_SHAPE.num_attention_heads,
        TOY_SHAPE.num_key_value_heads,
        TOY_SHAPE.head_dim,
    )
    total, hits, count = torch.zeros((), dtype=torch.float64), [0] * STEPS, 0
    for start, stop in zip(batch.documents.bounds, batch.documents.bounds[1:], strict=False):
        tokens = batch.tokens_N[start:stop].tolist()
        mask = batch.loss_mask_N[start:stop].tolist()
        length = stop - start
        count += sum(mask[u] and mask[u + 1] for u in range(1, length - 1))
        state = {t: w["fc.weight"] @ fc_input(net, batch.aux_N3H[start + t]) for t in range(length)}
        seen: list[dict[int, tuple[list[Tensor], list[Tensor]]]] = []
        for step in range(STEPS):
            now: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
            queries: dict[int, list[Tensor]] = {}
            for t in range(length - 1 - step):
                x = torch.cat(
                    [
                        rms(
                            embedding_VH[tokens[t + 1 + step]], w[layer + "input_layernorm.weight"]
                        ),
                        rms(state[t], w[layer + "hidden_norm.weight"]),
                    ]
                )
                q, k, v = (w[attn + f"{name}_proj.weight"] @ x for name in "qkv")
                queries[t] = [turn(part, t + step) for part in q.reshape(heads, width)]
                now[t] = (
                    [turn(part, t + step) for part in k.reshape(kv, width)],
                    list(v.reshape(kv, width)),
                )
            seen.append(now)
            new = {}
            for t, query in queries.items():
                visible = [seen[0][s] for s in range(t + 1)]
                visible += [seen[i][t] for i in range(1, step + 1)]
                attended = []
                for h in range(heads):
                    group = h // (heads // kv)
                    scores = torch.stack([query[h] @ keys[group] for keys, _ in visible])
                    weights = torch.softmax(scores / math.sqrt(width), dim=0)
                    values = torch.stack([values[group] for _, values in visible])
                    attended.append(weights @ values)
                hidden = state[t] + w[attn + "o_proj.weight"] @ torch.cat(attended)
                inner = rms(hidden, w[layer + "post_attention_layernorm.weight"])
                gate = w[layer + "mlp.gate_proj.weight"] @ inner
                up = w[layer + "mlp.up_proj.weight"] @ inner
                silu = gate * torch.sigmoid(gate)
                new[t] = hidden + w[layer + "mlp.down_proj.weight"] @ (silu * up)
            normed = {t: rms(new[t], w["norm.weight"]) for t in new}
            state = normed if net.shape.norm_output else new
            for t in state:
                if t + 2 + step >= length or not (mask[t + 1 + step] and mask[t + 2 + step]):
                    continue
                last = rms(batch.last_NH[start + t + 1 + step], head.norm_H)
                wanted = head.head_VH @ last
                if int(wanted.argmax()) not in ids:
                    continue
                p = torch.softmax(wanted[ids], dim=0)
                drafted = w["lm_head.weight"] @ normed[t]
                total = total - DECAY**step * (p * torch.log_softmax(drafted, dim=0)).sum()
                hits[step] += ids[int(drafted.argmax())] == int(wanted.argmax())
    return total / count, hits, count


@pytest.mark.parametrize(("seed", "norms"), [(1, "eagle3"), *enumerate(SHAPES)])
def test_loss_and_every_gradient_equal_a_slow_reference(seed: int, norms: str) -> None:
    net, batch, embedding, head, maps = toy_batch(seed, shape=SHAPES[norms])
    loss, hits, count = product_loss(net, batch, embedding, head, maps)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    expected, expected_hits, expected_count = reference_loss(net, batch, embedding, head, maps)
    expected.backward()

    assert count == expected_count
    assert hits == expected_hits
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert gradients.keys() == dict(net.named_parameters()).keys()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_toy_has_targets_outside_the_draft_vocabulary_and_inside() -> None:
    _, batch, _, head, maps = toy_batch()
    predictors = supervised_predictors(batch.loss_mask_N, batch.documents)
    choice = predict_target(head, maps, batch.last_NH[predictors]).choice_U

    assert (choice < 0).any()
    assert (choice >= 0).any()


def test_the_row_on_the_last_prompt_token_counts_and_the_first_answer_token_is_never_drafted() -> (
    None
):
    mask = torch.tensor([False, False, True, True, True, False])
    step = plan_unrolling(mask, Documents((0, 6)), steps=1).steps[0]

    # Rows 1 and 2 are fed tokens 2 and 3 and predict 3 and 4; row 0 would draft token 2.
    assert step.rows_R[step.counted_M].tolist() == [1, 2]


def test_nothing_is_predicted_across_the_end_of_a_turn() -> None:
    mask = torch.tensor([False, True, True, False, True, True])
    predicts = supervised_predictors(mask, Documents((0, 6)))

    assert predicts.nonzero()[:, 0].tolist() == [1, 4]


def test_rows_that_count_in_no_later_step_are_not_computed() -> None:
    mask = torch.tensor([c == "1" for c in "000000111100"])
    steps = plan_unrolling(mask, Documents((0, 12)), steps=3).steps

    assert [step.rows_R.tolist() for step in steps] == [[3, 4, 5, 6, 7], [3, 4, 5, 6], [3, 4, 5]]


def test_states_and_tokens_outside_a_documents_supervision_do_not_change_the_loss() -> None:
    net, batch, embedding, head, maps = toy_batch()
    loss, _, _ = product_loss(net, batch, embedding, head, maps)
    unsupervised = slice(batch.documents.bounds[3], batch.documents.bounds[4])
    batch.aux_N3H[unsupervised] += 5
    batch.last_NH[unsupervised] -= 5
    changed, _, _ = product_loss(net, batch, embedding, head, maps)

    assert loss.item() == changed.item()


def test_the_loss_is_the_same_however_few_logits_are_held_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, batch, embedding, head, maps = toy_batch()
    whole, hits, _ = product_loss(net, batch, embedding, head, maps)
    whole.backward()
    gradient = net.lm_head.weight.grad
    assert gradient is not None
    kept = gradient.clone()
    net.zero_grad()
    monkeypatch.setattr("eagle3.loss.LOGITS_AT_ONCE", 2 * TOY_SHAPE.draft_vocab)
    chunked, chunked_hits, _ = product_loss(net, batch, embedding, head, maps)
    chunked.backward()

    assert chunked.item() == pytest.approx(whole.item(), rel=1e-14)
    assert chunked_hits == hits
    torch.testing.assert_close(net.lm_head.weight.grad, kept, rtol=1e-12, atol=1e-14)
