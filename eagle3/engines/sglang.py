"""A drafter served by a running SGLang server, measured by the counts in its answers.

Written from SGLang's documentation, pull requests and published responses, and tested against
responses of that form; not run against a live SGLang.

Two spellings are in use: `spec_accept_token_num`, `spec_draft_token_num`, `spec_accept_histogram`
(2025), and `spec_num_correct_drafts`, `spec_num_proposed_drafts`, `spec_correct_drafts_histogram`
(2026); sources: sgl-project/sglang pull requests 11441, 13754 and 33518.

Ids of one prompt are sent as one flat list, to which SGLang answers one object; nested lists are
batches, answered by a list (GenerateReqInput in its io_struct.py).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.engines.base import Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.counters import NOTHING_COUNTED, SpecCounters, total
from eagle3.engines.served import Asked, Served, in_parallel, seed_of
from eagle3.errors import EngineError

_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")

SEEDS = 2**31
"""Some versions hold a seed in 32 bits, with a sign."""


@dataclass(frozen=True)
class SglangFacts:
    """What `/server_info` (once `/get_server_info`) says of a server."""

    version: str
    algorithm: str | None
    """EAGLE3 where a drafter of ours runs; None without speculation."""
    steps: int
    """k: tokens drafted in a chain."""
    topk: int
    acceptance_length: float | None
    """Mean since the server started, as SGLang counts it."""


def parse_server_info(info: Mapping[str, Any]) -> SglangFacts:
    """Read the answer of `/server_info`."""
    states = info.get("internal_states") or [{}]
    return SglangFacts(
        version=str(info.get("version", "unknown")),
        algorithm=info.get("speculative_algorithm"),
        steps=int(info.get("speculative_num_steps") or 0),
        topk=int(info.get("speculative_eagle_topk") or 1),
        acceptance_length=states[0].get("avg_spec_accept_length"),
    )


def parse_meta_info(meta: Mapping[str, Any]) -> SpecCounters:
    """Read one answer's `meta_info`; zero where the server drafted nothing.

    SGLang's own acceptance length divides completion tokens by verifications, and so counts the
    prefill's token too; ours is 1 + accepted / verifications, which is what vLLM counts.

    Raises:
        EngineError: there are verifications, but not how many tokens they accepted.
    """
    drafts = int(meta.get("spec_verify_ct") or 0)
    if drafts == 0:
        return NOTHING_COUNTED
    histogram = _first(meta, _HISTOGRAM)
    accepted = _first(meta, _ACCEPTED)
    if accepted is None and histogram is not None:
        accepted = sum(length * count for length, count in enumerate(histogram))
    if accepted is None:
        raise EngineError(
            f"SGLang's meta_info has spec_verify_ct but none of {', '.join(_ACCEPTED)}; it needs "
            "SGLang 0.5.5 or newer"
        )
    # histogram[n] chains had exactly n tokens accepted: position i was in all with more than i.
    at = [sum(histogram[i + 1 :]) for i in range(len(histogram) - 1)] if histogram else []
    return SpecCounters(drafts, int(_first(meta, _PROPOSED) or 0), int(accepted), tuple(at))


def answer_ids(answer: Mapping[str, Any]) -> list[int]:
    """The ids that were generated, end token included.

    Versions of 2025 and 2026 put the end of the prompt before them (sgl-project/sglang issues 10896
    and 17240), but count them right.

    Raises:
        EngineError: the server gives no ids, or fewer than it generated.
    """
    ids = answer.get("output_ids") or []
    count = int(answer["meta_info"]["completion_tokens"])
    if len(ids) < count:
        raise EngineError(
            f"SGLang generated {count} tokens, but answered {len(ids)} output_ids; start it with "
            "--skip-tokenizer-init, or take version 0.5.5 or newer"
        )
    return list(ids[len(ids) - count :])


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


class SglangClient:
    """A running SGLang server, asked by token ids through `/generate`."""

    def __init__(self, http: HttpClient, stop: Collection[int]) -> None:
        self.http = http
        self.facts = parse_server_info(_server_info(http))
        self.name = f"sglang {self.facts.version}"
        self._stop = sorted(stop)
        if self.facts.topk != 1:
            raise EngineError(
                f"{http.url} drafts trees (speculative_eagle_topk {self.facts.topk}); acceptance "
                "is defined on chains: start it with --speculative-eagle-topk 1"
            )

    def run(self, asked: Sequence[Asked], at_once: int) -> Served:
        """Answer the prompts, at most `at_once` at a time, and add up what the drafter did."""
        started = time.perf_counter()
        answers = in_parallel(lambda one: self._generate(one.prompt, one.sampling), asked, at_once)
        seconds = time.perf_counter() - started
        counters = total(parse_meta_info(answer["meta_info"]) for answer in answers)
        return Served([answer_ids(answer) for answer in answers], seconds, counters)

    def _generate(self, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "sampling_seed": seed_of(sampling.seed, prompt) % SEEDS,
                "stop_token_ids": self._stop,
            },
        }
        answer = self.http.post("/generate", body)
        read = answer["meta_info"].get("prompt_tokens")
        if read != len(prompt):
            raise EngineError(
                f"{self.http.url} read {read} prompt tokens where {len(prompt)} were sent"
            )
        return answer


def _server_info(http: HttpClient) -> Mapping[str, Any]:
    try:
        return http.get("/server_info")
    except EngineError:
        # The name until late 2025.
        return http.get("/get_server_info")
