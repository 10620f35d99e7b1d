"""The hot path, on a CPU in float64, against the slow reference of test_ttt."""

import pytest
import torch
from torch import Tensor

from eagle3.attention import Documents
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.ttt import Batch, plan_unrolling, supervised_predictors, unroll
from eagle3.vocab import VocabMaps

H, V, D, STEPS = 8, 23, 11, 4
WEIGHTS = [0.8**step for step in range(STEPS)]
SHAPE = DraftShape(
    hidden_size=H,
    vocab_size=V,
    draft_vocab=D,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=64,
)
MASKS = ("0001111001110", "0011111", "000010", "00000")


def toy(seed: int, masks: tuple[str, ...], dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    net = DrafterNet(SHAPE).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(randn(*parameter.shape) * 0.4)
    mask = torch.tensor([c == "1" for row in masks for c in row])
    bounds = [0]
    for row in masks:
        bounds.append(bounds[-1] + len(row))
    batch = Batch(
        tokens_N=torch.randint(V, (len(mask),), generator=generator),
        loss_mask_N=mask,
        aux_N3H=randn(len(mask), 3, H),
        last_NH=randn(len(mask), H),
        documents=Documents(tuple(bounds)),
    )
    ids = torch.randperm(V, generator=generator)[:D].sort().values
    kept = torch.zeros(V, dtype=torch.bool)
    kept[ids] = True
    maps = VocabMaps(ids - torch.arange(D), kept)
    head = TargetHead(randn(H).abs(), 1e-5, randn(V, H))
    return net, batch, randn(V, H), head, maps


def plain(net, batch, embedding_VH, head, maps):
    """Nats and hits of each step, and gradients, by the plain path."""
    unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, STEPS)
    prediction = predict_target(head, maps, batch.last_NH[unrolling.predictors_U])
    nats, hits = [], []
    for step, state in unroll(net, batch, embedding_VH[batch.tokens_N], unrolling):
        hidden = net.norm(state[step.counted_M])
        total, agreed = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
        nats.append(total)
        hits.append(agreed)
    sum(w * n for w, n in zip(WEIGHTS, nats, strict=True)).backward()
    return torch.stack(nats).detach(), torch.stack(hits)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("masks", [MASKS, ("1" * 9,), ("0" * 4, "1" * 5), ("0011", "011")])
def test_loss_hits_and_every_gradient_equal_those_of_the_plain_path(seed, masks) -> None:
    net, batch, embedding, head, maps = toy(seed, masks)
    nats, hits = plain(net, batch, embedding, head, maps)
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    figures = HotPath(net, embedding, head, maps).backward(batch, WEIGHTS)

    torch.testing.assert_close(figures.nats_S, nats, rtol=1e-12, atol=1e-12)
    assert figures.hits_S.tolist() == hits.tolist()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)
