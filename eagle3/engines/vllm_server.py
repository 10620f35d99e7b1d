"""How vLLM's server is started for us, and how it is asked: by token ids, and for its counters."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import TargetModel
from eagle3.engines.base import Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.counters import (
    NOTHING_COUNTED,
    SpecCounters,
    generated_tokens,
    parse_counters,
)
from eagle3.engines.served import Asked, Served, in_parallel, seed_of
from eagle3.engines.server import EngineInstall
from eagle3.errors import EngineError

AT_ONCE = 64
"""Prompts that a server answers together."""


@dataclass(frozen=True)
class ServerOptions:
    """How a vLLM server is started."""

    target: Path
    trust_remote_code: bool
    dtype: str
    max_length: int
    """Tokens of the longest prompt and its answer together."""
    at_once: int
    speculation: dict[str, Any] | None
    states_folder: Path | None
    """Where the connector writes hidden states, if it is to."""


def with_drafter(drafter: Path, draft_tokens: int, engine: EngineInstall) -> dict[str, Any]:
    """The speculation of a server that drafts `draft_tokens` with the drafter of a folder."""
    speculation: dict[str, Any] = {
        "method": "eagle3",
        "model": str(drafter.resolve()),
        "num_speculative_tokens": draft_tokens,
    }
    if engine.draft_sampling == "probabilistic":
        # At temperature 0 the draft is the argmax all the same.
        speculation["draft_sample_method"] = "probabilistic"
    return speculation


def with_states(layers: Sequence[int]) -> dict[str, Any]:
    """The "speculation" by which vLLM extracts states; its layer ids are ours (docs, contracts)."""
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": config,
    }


def extracted_layers(target: TargetModel) -> list[int]:
    """Layers whose states are taken, rising: the aux layers and the last."""
    return sorted({*target.aux_layers, target.num_layers})


def target_options(
    target: TargetModel, folder: Path, dtype: str, max_length: int, states_folder: Path
) -> ServerOptions:
    """A server of the target, in `folder`, that answers and gives states."""
    return ServerOptions(
        target=folder,
        trust_remote_code=target.trust_remote_code,
        dtype=dtype,
        max_length=max_length,
        at_once=AT_ONCE,
        speculation=with_states(extracted_layers(target)),
        states_folder=states_folder,
    )


def server_arguments(options: ServerOptions, engine: EngineInstall) -> list[str]:
    """The command line of vLLM's server."""
    arguments = [
        *("--model", str(options.target), "--served-model-name", "target"),
        *("--dtype", options.dtype, "--max-model-len", str(options.max_length)),
        *("--max-num-seqs", str(options.at_once)),
        # A cached prefix gives no states, and would flatter the speed of a repeated prompt.
        "--no-enable-prefix-caching",
        # Sampling is said with every request, not by the target's generation_config.json.
        *("--generation-config", "vllm"),
    ]
    if engine.on_cpu:
        arguments.append("--enforce-eager")
    if options.trust_remote_code:
        arguments.append("--trust-remote-code")
    if options.speculation is not None:
        arguments += ["--speculative-config", json.dumps(options.speculation)]
    if options.states_folder is not None:
        transfer = {
            "kv_connector": "Eagle3HiddenStates",
            "kv_connector_module_path": "eagle3_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(options.states_folder)},
        }
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


class VllmClient:
    """A running vLLM server, asked by token ids."""

    def __init__(self, http: HttpClient, stop: Collection[int]) -> None:
        self.http = http
        self.name = f"vllm {http.get('/version')['version']}"
        self._model = http.get("/v1/models")["data"][0]["id"]
        self._stop = sorted(stop)

    def complete(
        self, prompt: Sequence[int], sampling: Sampling, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """The whole answer to one prompt; its echo of the prompt is checked."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "seed": seed_of(sampling.seed, prompt),
            "stop_token_ids": self._stop,
            "return_token_ids": True,
            **extra,
        }
        answer = self.http.post("/v1/completions", body)
        echoed = answer["choices"][0].get("prompt_token_ids")
        if echoed != list(prompt):
            raise EngineError(
                f"{self.http.url} read another prompt than it was sent ({len(prompt)} ids sent, "
                f"{len(echoed or [])} echoed); it must be vLLM 0.25 or newer, serving this target"
            )
        return answer

    def answer(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """The ids that continue one prompt, its end token included."""
        return self.complete(prompt, sampling, {})["choices"][0]["token_ids"]

    def run(self, asked: Sequence[Asked], at_once: int) -> Served:
        """Answer the prompts, at most `at_once` at a time, and count what the drafter did."""
        before, started = self.counters(), time.perf_counter()
        answers = in_parallel(lambda one: self.answer(one.prompt, one.sampling), asked, at_once)
        seconds = time.perf_counter() - started
        return Served(answers, seconds, self.counters() - before)

    def top_two_gap(self, prompt: Sequence[int]) -> float:
        """How far apart the two likeliest next tokens of the target are, in nats."""
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1, seed=0)
        answer = self.complete(prompt, greedy, {"logprobs": 2, "return_tokens_as_token_ids": True})
        best = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
        return best[0] - best[1]

    def counters(self) -> SpecCounters:
        """Counts of speculation since the server started, once it is at rest."""
        text = self.http.get_text("/metrics")
        # The counters follow the answers by a moment: read until nothing moves.
        while True:
            time.sleep(0.05)
            again = self.http.get_text("/metrics")
            if generated_tokens(again) == generated_tokens(text):
                break
            text = again
        if "vllm:spec_decode_num_drafts" not in again:
            return NOTHING_COUNTED
        return parse_counters(again, self.http.url)
