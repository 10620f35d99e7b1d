"""Against responses in the form that SGLang documents; no live SGLang was at hand."""

import pytest
from http_stand_in import answering

from eagle3.engines.base import Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.counters import NOTHING_COUNTED, SpecCounters
from eagle3.engines.served import Asked
from eagle3.engines.sglang import SglangClient, answer_ids, parse_meta_info, parse_server_info
from eagle3.errors import EngineError

# From sgl-project/sglang pull request 33518: a histogram of accepted drafts per verification.
NEWER = {
    "completion_tokens": 106,
    "spec_accept_rate": 0.2930232558139535,
    "spec_accept_length": 2.4651162790697674,
    "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215,
    "spec_verify_ct": 43,
    "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
}
# From pull request 13754.
OLDER = {
    "prompt_tokens": 171,
    "completion_tokens": 200,
    "spec_accept_rate": 0.011702127659574468,
    "spec_accept_length": 1.0638297872340425,
    "spec_verify_ct": 188,
    "spec_accept_token_num": 11,
    "spec_draft_token_num": 940,
}
# Of one prompt of three ids, sent as a flat list: the answer is one object, not a list.
COUNTS = {
    "id": "2f5d",
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "cached_tokens": 0,
}
SERVER_INFO = {
    "version": "0.5.6",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "internal_states": [{"avg_spec_accept_length": 2.1}],
}


def test_a_histogram_becomes_the_rate_of_each_position():
    counters = parse_meta_info(NEWER)

    # 32 chains had more than no token accepted, 18 more than one, ...
    assert counters == SpecCounters(43, 215, 63, (32, 18, 7, 3, 3))
    assert sum(counters.accepted_at) == counters.accepted


def test_older_servers_count_under_other_names_and_have_no_histogram():
    counters = parse_meta_info(OLDER)

    assert counters == SpecCounters(188, 940, 11, ())
    assert counters.acceptance_length == pytest.approx(1 + 11 / 188)


def test_our_acceptance_length_leaves_out_the_token_of_the_prefill():
    # SGLang's own is completion tokens per verification, and one of them was never verified.
    ours = parse_meta_info(NEWER).acceptance_length

    assert ours == pytest.approx(1 + 63 / 43)
    assert NEWER["spec_accept_length"] * 43 == pytest.approx(ours * 43)


def test_an_answer_without_verifications_counts_nothing():
    assert parse_meta_info({"completion_tokens": 1}) == NOTHING_COUNTED


def test_verifications_without_accepted_counts_name_the_version_to_use():
    with pytest.raises(EngineError, match="it needs SGLang"):
        parse_meta_info({"spec_verify_ct": 5})


def test_server_info_says_version_chain_length_and_mean():
    facts = parse_server_info(SERVER_INFO)

    assert (facts.version, facts.algorithm, facts.steps) == ("0.5.6", "EAGLE3", 3)
    assert facts.acceptance_length == 2.1


def test_a_server_without_speculation_has_no_algorithm():
    facts = parse_server_info({"version": "0.5.6", "speculative_algorithm": None})

    assert (facts.algorithm, facts.steps, facts.acceptance_length) == (None, 0, None)


def test_a_server_that_drafts_trees_is_refused():
    info = {**SERVER_INFO, "speculative_eagle_topk": 4}
    with (
        answering({"/server_info": info}) as server,
        pytest.raises(EngineError, match="--speculative-eagle-topk 1"),
    ):
        SglangClient(HttpClient(server.url), stop={2})


def test_answers_come_as_ids_with_the_counts_of_all_prompts():
    answer = {"output_ids": [7, 8, 2], "meta_info": {**NEWER, **COUNTS}}
    asked = [
        Asked([1, 5, 6], Sampling(0.0, 1.0, 16, 0)),
        Asked([1, 9, 6], Sampling(0.0, 1.0, 9, 0)),
    ]
    with answering({"/server_info": SERVER_INFO, "/generate": answer}) as server:
        client = SglangClient(HttpClient(server.url), stop={2})
        served = client.run(asked, at_once=2)

    assert client.name == "sglang 0.5.6"
    assert served.answers == [[7, 8, 2], [7, 8, 2]]
    assert served.counters.drafts == 86
    sent = sorted((body for _, body in server.received), key=lambda body: body["input_ids"])
    assert [body["input_ids"] for body in sent] == [[1, 5, 6], [1, 9, 6]]
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [16, 9]
    assert sent[0]["sampling_params"]["stop_token_ids"] == [2]
    assert all(body["sampling_params"]["sampling_seed"] < 2**31 for body in sent)


def test_the_end_of_the_prompt_before_an_answer_is_no_part_of_it():
    # The form of sgl-project/sglang issue 17240: more ids than completion_tokens.
    answer = {"text": "It is", "output_ids": [5, 6, 7, 8, 2], "meta_info": COUNTS}

    assert answer_ids(answer) == [7, 8, 2]
    assert answer_ids({**answer, "output_ids": [7, 8, 2]}) == [7, 8, 2]


def test_an_answer_without_its_ids_names_what_gives_them():
    with pytest.raises(EngineError, match="0 output_ids; start it with --skip-tokenizer-init"):
        answer_ids({"text": "It is", "meta_info": COUNTS})


def test_older_servers_describe_themselves_under_another_path():
    with answering({"/get_server_info": SERVER_INFO}) as server:
        assert SglangClient(HttpClient(server.url), stop={2}).facts.steps == 3


def test_a_prompt_that_the_server_changed_is_noticed():
    answer = {"output_ids": [7], "meta_info": {**OLDER}}
    with answering({"/server_info": SERVER_INFO, "/generate": answer}) as server:
        client = SglangClient(HttpClient(server.url), stop={2})
        with pytest.raises(EngineError, match="read 171 prompt tokens where 2 were sent"):
            client.run([Asked([1, 5], Sampling(0.0, 1.0, 4, 0))], at_once=1)
