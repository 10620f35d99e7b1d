"""Measure a drafter in servers that somebody else runs, named by address: vLLM or SGLang."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from eagle3.artifacts import Corpus, TargetModel, write_atomically
from eagle3.engines.client import HttpClient
from eagle3.engines.sglang import SglangClient
from eagle3.engines.vllm_server import VllmClient
from eagle3.errors import EngineError
from eagle3.progress import Reporter
from eagle3.serve import DETAILS_FILE, eval_turns, find_differences, measure
from eagle3.serve_params import ServeParams
from eagle3.served_figures import PLAIN, details, metrics
from eagle3.store.rows import load_rows
from eagle3.target import end_token_ids

EngineKind = Literal["vllm", "sglang"]


def measure_running(
    kind: EngineKind,
    url: str,
    plain_url: str | None,
    target: TargetModel,
    params: ServeParams,
    out: Path,
    report: Reporter,
) -> dict[str, float]:
    """Measure the drafter that the server at `url` runs with, on the eval split.

    k is the server's own; `plain_url` is a server of the same target without drafter, and gives
    speedup and losslessness. Writes serving.json into `out`.

    Raises:
        EngineError: a server does not answer, reads other prompts, or has no drafter.
    """
    turns = eval_turns(load_rows(Corpus.home / "eval.zarr"), params.prompts)
    stop = end_token_ids(target)
    client = connect(kind, url, stop)
    k = draft_tokens(client, url)
    runs = []
    if plain_url:
        runs += measure(connect(kind, plain_url, stop), PLAIN, turns, params, report)
    runs += measure(client, k, turns, params, report)
    gap = client.top_two_gap if isinstance(client, VllmClient) else None
    differences = find_differences(runs, k, gap) if plain_url else []
    figures = metrics(runs, differences, {})
    everything: dict[str, Any] = {
        "engine": client.name,
        "url": url,
        "server": asdict(client.facts) if isinstance(client, SglangClient) else {},
        "metrics": figures,
        **details(runs, differences, {}),
    }
    write_atomically(out / DETAILS_FILE, json.dumps(everything, indent=2) + "\n")
    return figures


def connect(kind: EngineKind, url: str, stop: Collection[int]) -> VllmClient | SglangClient:
    """Greet a running server."""
    http = HttpClient(url)
    return SglangClient(http, stop) if kind == "sglang" else VllmClient(http, stop)


def draft_tokens(client: VllmClient | SglangClient, url: str) -> int:
    """The k that a server drafts with.

    Raises:
        EngineError: it runs without a drafter.
    """
    if isinstance(client, SglangClient):
        k = client.facts.steps
    else:
        k = len(client.counters().accepted_at)
    if k == 0:
        raise EngineError(
            f"{url} runs without a drafter; give it as the plain server, and start another with "
            "--speculative-config (vLLM) or --speculative-algorithm EAGLE3 (SGLang)"
        )
    return k
