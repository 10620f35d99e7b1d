"""The drafters of a tiny project in vLLM: lossless, and accepted as replay says."""

import json

import pytest

from eagle3.progress import ConsoleReporter
from eagle3.serve import serve_drafter
from eagle3.serve_params import ServeParams
from eagle3.serving import Serving

K = 3


def serve(project, size) -> Serving:
    params = ServeParams(
        draft_tokens=(K,),
        temperatures=(0.0, 1.0),
        batch_sizes=(1, 8),
        prompts=8,
        seed=0,
        dtype="float32",
    )
    return serve_drafter(
        project.target,
        project.corpus,
        project.states,
        project.drafters[size],
        params,
        Serving.home(size),
        ConsoleReporter(),
    )


@pytest.fixture(scope="module", params=[128, "full"], ids=str)
def serving(request, project) -> Serving:
    return serve(project, request.param)


def test_greedy_text_is_the_same_with_and_without_the_drafter(serving):
    assert serving.metrics[f"lossless_served_k{K}"] == 1.0
    assert serving.metrics["answers_as_stored"] == 1.0


def test_the_engine_accepts_what_replay_says_on_the_same_prompts(serving):
    served = serving.metrics[f"acceptance_length_served_k{K}"]
    replayed = serving.metrics[f"acceptance_length_same_prompts_k{K}"]

    assert served > 1.03, "a drafter that is never accepted proves nothing"
    assert served == pytest.approx(replayed, abs=0.03)


def test_rates_by_position_add_up_to_the_acceptance_length(serving):
    rates = [serving.metrics[f"acceptance_rate_served_k{K}_pos{i}"] for i in range(K)]

    assert rates == sorted(rates, reverse=True)
    assert 1 + sum(rates) == pytest.approx(serving.metrics[f"acceptance_length_served_k{K}"])


def test_every_run_is_kept_with_its_domain_and_the_servers_log(serving):
    found = json.loads((Serving.home(serving.size) / "serving.json").read_text())
    runs = found["runs"]

    assert {run["domain"] for run in runs} == {"chat", "held-out"}
    assert {(run["k"], run["temperature"], run["batch"]) for run in runs} == {
        (k, temperature, batch) for k in (0, K) for temperature in (0.0, 1.0) for batch in (1, 8)
    }
    assert (Serving.home(serving.size) / f"vllm-k{K}.log").is_file()
    assert Serving.load(Serving.home(serving.size)) == serving
