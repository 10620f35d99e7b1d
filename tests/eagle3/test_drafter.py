"""The network when it decodes with a cache, against the same network unrolled and replayed."""

import pytest
import torch
from torch import Tensor
from toys import SHAPES, TOY_SHAPE, toy_drafter, toy_maps, toy_sequence

from eagle3.attention import Documents, rotate
from eagle3.drafter import DraftCache, DrafterNet
from eagle3.replay import draft_chains
from eagle3.ttt import Batch, plan_unrolling, unroll


def decode_chain(
    net: DrafterNet, tokens: Tensor, aux: Tensor, embedding: Tensor, ids: Tensor, row: int, k: int
) -> list[int]:
    """Draft as a serving engine does: prefill rows 0..row, then one row at a time."""
    cache = DraftCache.empty(net.shape, embedding)
    rows = torch.arange(row + 1)
    states = net.decode(embedding[tokens[rows + 1]], net.fuse(aux[rows]), rows, cache)
    state, drafted = states[-1:], []
    for step in range(1, k + 1):
        drafted.append(int(ids[net.logits(state).argmax()]))
        position = torch.tensor([row + step])
        state = net.decode(embedding[drafted[-1:]], state, position, cache)
    return drafted


@pytest.mark.parametrize("norms", SHAPES)
def test_chains_of_replay_equal_decoding_with_a_cache(norms: str) -> None:
    net, maps = toy_drafter(SHAPES[norms]), toy_maps()
    tokens, aux, embedding = toy_sequence(9)
    rows = torch.tensor([2, 3, 4, 6])
    chains = draft_chains(net, embedding, maps, tokens, aux, rows, steps=5)

    for row, chain in zip(rows.tolist(), chains.tolist(), strict=True):
        assert chain == decode_chain(net, tokens, aux, embedding, maps.ids_D, row, 5)


@pytest.mark.parametrize("norms", SHAPES)
def test_states_of_the_unrolling_equal_decoding_of_the_same_tokens(norms: str) -> None:
    net = toy_drafter(SHAPES[norms])
    tokens, aux, embedding = toy_sequence(9)
    mask = torch.tensor([False] * 3 + [True] * 6)
    documents = Documents((0, 9))
    batch = Batch(tokens, mask, aux, aux[:, 0], documents)
    steps = list(unroll(net, batch, embedding[tokens], plan_unrolling(mask, documents, 3)))
    row = 2
    cache = DraftCache.empty(net.shape, embedding)
    rows = torch.arange(row + 1)
    state = net.decode(embedding[tokens[rows + 1]], net.fuse(aux[rows]), rows, cache)[-1:]

    for index, (step, states) in enumerate(steps):
        if index:
            fed = tokens[row + 1 + index]
            state = net.decode(embedding[fed][None], state, torch.tensor([row + index]), cache)
        place = step.rows_R.tolist().index(row)
        torch.testing.assert_close(states[place], state[0])
        scores = net.lm_head(net.head_input(states[place]))
        torch.testing.assert_close(scores, net.logits(state)[0])


def test_a_truncated_cache_forgets_a_rejected_draft() -> None:
    net = toy_drafter()
    tokens, aux, embedding = toy_sequence(6)
    rows = torch.arange(4)
    cache = DraftCache.empty(net.shape, embedding)
    net.decode(embedding[tokens[rows + 1]], net.fuse(aux[rows]), rows, cache)
    token, hidden, position = embedding[tokens[5:6]], net.fuse(aux[4:5]), torch.tensor([4])
    expected = net.decode(token, hidden, position, cache)
    cache.truncate(4)
    net.decode(embedding[tokens[:1]], net.fuse(aux[5:6]), position, cache)
    cache.truncate(4)

    torch.testing.assert_close(net.decode(token, hidden, position, cache), expected)
    assert cache.length == 5


def test_rope_turns_as_hugging_faces_llama_does() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    heads = torch.randn(5, 4, 6)
    positions = torch.tensor([0, 1, 4, 7, 30])
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(
        heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin
    )

    torch.testing.assert_close(rotate(heads, positions, 100.0), expected[0].transpose(0, 1))


@pytest.mark.parametrize("norms", SHAPES)
def test_the_networks_parameters_are_those_that_engines_load(norms: str) -> None:
    from eagle3.contract import tensor_table

    config = {
        "hidden_size": TOY_SHAPE.hidden_size,
        "intermediate_size": TOY_SHAPE.intermediate_size,
        "num_attention_heads": TOY_SHAPE.num_attention_heads,
        "num_key_value_heads": TOY_SHAPE.num_key_value_heads,
        "head_dim": TOY_SHAPE.head_dim,
        "vocab_size": TOY_SHAPE.vocab_size,
        "draft_vocab_size": TOY_SHAPE.draft_vocab,
        "fc_norm": SHAPES[norms].fc_norm,
    }
    table = tensor_table(config)
    net = toy_drafter(SHAPES[norms])
    shapes = {name: tuple(t.shape) for name, t in net.state_dict().items()}

    assert shapes == {n: spec.shape for n, spec in table.items() if n not in ("d2t", "t2d")}
