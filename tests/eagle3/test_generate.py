"""Drafter and target together write what the target writes alone, and replay counts the same."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.acceptance import Tally, drafting_rows, tally_answer
from eagle3.drafter import DraftCache, DrafterNet, DraftShape
from eagle3.generate import DraftDecoder, TargetDecoder, decode_plainly, speculate
from eagle3.replay import draft_chains
from eagle3.vocab import build_draft_vocab

AUX_LAYERS = (2, 4, 5)
NO_END = frozenset()
PROMPTS = [[1, 40, 41, 42, 43], [1, 60, 61, 60, 62, 63, 64, 65], [1, 90, 12, 250]]
LIMIT = 24


@pytest.fixture(scope="module")
def model(tiny_target):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_target).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def embedding_VH(model) -> Tensor:
    return model.get_input_embeddings().weight.detach()


@pytest.fixture(scope="module")
def texts(model) -> list[list[int]]:
    """Each prompt with the target's own greedy answer, by transformers' own generation."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=LIMIT,
            min_new_tokens=LIMIT,
            eos_token_id=319,
            pad_token_id=2,
        )
        rows.append(out[0].tolist())
    return rows


def aux_states(model, tokens: list[int]) -> Tensor:
    """From one pass over the row, by transformers' own hidden states: [T, 3, H]."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([hidden[layer][0] for layer in AUX_LAYERS], dim=1)


@pytest.fixture(scope="module")
def maps(texts):
    """A draft vocabulary that lacks some of what the target says."""
    answers = torch.tensor([token for row in texts for token in row[-LIMIT:]])
    counts = torch.bincount(answers, minlength=320)
    return build_draft_vocab(counts, draft_size=max(2, int((counts > 0).sum()) - 2), keep_ids=[])


@pytest.fixture(scope="module")
def net(model, embedding_VH, texts, maps) -> DrafterNet:
    """A drafter that has seen the texts a few times: right often, wrong often."""
    torch.manual_seed(0)
    shape = DraftShape(
        hidden_size=32,
        vocab_size=320,
        draft_vocab=len(maps.ids_D),
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
    )
    net = DrafterNet(shape)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    rows = [(torch.tensor(row), aux_states(model, row)) for row in texts]
    for _ in range(25):
        loss = torch.zeros(())
        for tokens_T, aux_T3H in rows:
            fed = embedding_VH[tokens_T[1:-1]]
            positions = torch.arange(len(fed))
            cache = DraftCache.empty(shape, like=fed)
            hidden = net.decode(fed, net.fuse(aux_T3H[:-2]), positions, cache)
            wanted = maps.to_draft_V[tokens_T[2:]]
            loss = loss + F.cross_entropy(net.logits(hidden), wanted, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


@pytest.fixture
def write(model, net, embedding_VH, maps):
    def write_together(prompt, k, limit=LIMIT, end_tokens=NO_END, drafter=net):
        return speculate(
            TargetDecoder(model, AUX_LAYERS),
            DraftDecoder(drafter, embedding_VH, maps),
            prompt,
            limit,
            k,
            end_tokens,
        )

    return write_together


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_plain_decoding_equals_the_targets_own_generation(model, texts, index):
    prompt = PROMPTS[index]
    answer = decode_plainly(TargetDecoder(model, AUX_LAYERS), prompt, LIMIT, NO_END)
    assert answer.tokens == texts[index][len(prompt) :]
    assert len(answer.gaps) == LIMIT


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_the_loop_writes_what_the_target_writes_alone(write, texts, index, k):
    answer = write(PROMPTS[index], k)
    assert answer.tokens == texts[index][len(PROMPTS[index]) :]
    assert len(answer.gaps) == LIMIT


def test_the_drafter_of_these_tests_is_sometimes_right_and_sometimes_wrong(write, maps):
    tallies = [write(prompt, 3).tally(3, maps.t2d_V) for prompt in PROMPTS]
    total = sum(tallies, Tally.empty(3))
    assert 1.2 < total.acceptance_length < 3.8
    assert total.oov_misses > 0


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_replay_drafts_and_counts_exactly_what_the_loop_did(
    write, model, net, embedding_VH, maps, texts, index, k
):
    answer = write(PROMPTS[index], k)

    row = np.array(texts[index])
    span = slice(len(PROMPTS[index]), len(row))
    rows_P = torch.from_numpy(drafting_rows(span))
    aux_T3H = aux_states(model, texts[index])
    chains = draft_chains(net, embedding_VH, maps, torch.from_numpy(row), aux_T3H, rows_P, k)
    replayed = tally_answer(chains.numpy(), row, span, maps.t2d_V.numpy(), k)
    assert answer.tally(k, maps.t2d_V) == replayed
    chain_of = dict(zip(rows_P.tolist(), chains.tolist(), strict=True))
    assert [list(draft.proposed) for draft in answer.drafts] == [
        chain_of[draft.row] for draft in answer.drafts
    ]


def test_an_untrained_drafter_costs_acceptance_but_no_token(write, net, texts):
    torch.manual_seed(1)
    answer = write(PROMPTS[0], 3, drafter=DrafterNet(net.shape))
    assert answer.tokens == texts[0][len(PROMPTS[0]) :]


@pytest.mark.parametrize("place", range(LIMIT))
def test_an_answer_ends_with_its_end_token_even_inside_an_accepted_draft(write, texts, place):
    text = texts[0][len(PROMPTS[0]) :]
    end = text[place]
    answer = write(PROMPTS[0], 3, end_tokens={end})
    assert answer.tokens == text[: text.index(end) + 1]
    assert len(answer.gaps) == len(answer.tokens)
    # One prefilled token, and for each draft what it got accepted plus at most one of the target's.
    accepted = sum(draft.accepted for draft in answer.drafts)
    assert len(answer.drafts) + accepted - (len(answer.tokens) - 1) in (0, 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_a_cut_answer_has_exactly_as_many_tokens_as_asked_for(write, texts, limit):
    answer = write(PROMPTS[1], 5, limit=limit)
    assert answer.tokens == texts[1][len(PROMPTS[1]) :][:limit]
    if limit == 1:
        assert not answer.drafts


def test_a_forgotten_token_leaves_no_trace_in_the_targets_cache(model):
    decoder = TargetDecoder(model, AUX_LAYERS)
    decoder.step([5, 6, 7])
    decoder.step([8, 9, 10])
    decoder.forget(2)
    logits, aux = decoder.step([11])

    expected, expected_aux = TargetDecoder(model, AUX_LAYERS).step([5, 6, 7, 8, 11])
    torch.testing.assert_close(logits[-1], expected[-1])
    torch.testing.assert_close(aux[-1], expected_aux[-1])
    assert decoder.length == 5


def test_the_states_that_feed_the_drafter_are_those_after_so_many_layers(model):
    _, aux = TargetDecoder(model, AUX_LAYERS).step([5, 6, 7])
    torch.testing.assert_close(aux, aux_states(model, [5, 6, 7]))
