"""A drafter in a running server: SGLang's documented answers, given by a stand-in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_stand_in import answering

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import Params, ServeParams
from eagle3.errors import EngineError
from eagle3.progress import ConsoleReporter
from eagle3.serve_url import measure_running
from eagle3.store.rows import Rows, save_rows
from eagle3.target import bring_target

PROMPT, ANSWER = [4, 5, 6, 7], [8, 9, 2]
META = {
    "prompt_tokens": len(PROMPT),
    "completion_tokens": len(ANSWER),
    "spec_verify_ct": 2,
    "spec_num_correct_drafts": 3,
    "spec_num_proposed_drafts": 6,
    "spec_correct_drafts_histogram": [0, 1, 1, 0],
}
PLAIN_META = {"prompt_tokens": len(PROMPT), "completion_tokens": len(ANSWER)}
INFO = {
    "version": "0.5.6",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
}
SERVE = ServeParams(
    engine="none",
    draft_tokens=(3,),
    temperatures=(0.0,),
    batch_sizes=(1,),
    prompts=2,
    seed=0,
    dtype="float32",
)


@pytest.fixture
def project(tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    """The target, and an eval split of one row; returns the target's record."""
    monkeypatch.chdir(tmp_path)
    rows = Rows(
        tokens_N=np.array([*PROMPT, *ANSWER], dtype=np.int32),
        loss_mask_N=np.array([False] * len(PROMPT) + [True] * len(ANSWER)),
        offsets_R1=np.array([0, len(PROMPT) + len(ANSWER)]),
        domains=("chat",),
        row_ids=("a",),
    )
    save_rows(rows, Corpus.home / "eval.zarr")
    return bring_target(tiny_params.target, TargetModel.home)


def sglang(answer: list[int], **info: Any) -> dict[str, Any]:
    return {
        "/server_info": {**INFO, **info},
        "/generate": {"output_ids": answer, "meta_info": META},
    }


def test_acceptance_is_what_the_server_counted(project: TargetModel) -> None:
    with answering(sglang(ANSWER)) as server:
        out = Path("measured")
        figures = measure_running(
            "sglang", server.url, None, project, SERVE, out, ConsoleReporter()
        )

    assert figures["acceptance_length_served_k3"] == 1 + 3 / 2
    assert figures["acceptance_rate_served_k3_pos0"] == 1.0
    assert figures["acceptance_rate_served_k3_pos1"] == 0.5
    assert "lossless_served_k3" not in figures
    kept = json.loads((out / "serving.json").read_text())
    assert (kept["engine"], kept["url"]) == ("sglang 0.5.6", server.url)


def test_beside_a_plain_server_changed_text_is_counted(project: TargetModel) -> None:
    plain = sglang(ANSWER, speculative_algorithm=None, speculative_num_steps=None)
    plain["/generate"] = {"output_ids": ANSWER, "meta_info": PLAIN_META}
    with answering(sglang([8, 3, 2])) as drafting, answering(plain) as alone:
        figures = measure_running(
            *("sglang", drafting.url, alone.url),
            *(project, SERVE, Path("measured"), ConsoleReporter()),
        )

    assert figures["lossless_served_k3"] == 0.0
    assert figures["answers_as_stored"] == 1.0
    assert figures["speedup_served_k3"] > 0


def test_a_server_without_a_drafter_is_named(project: TargetModel) -> None:
    with (
        answering(sglang(ANSWER, speculative_num_steps=None)) as server,
        pytest.raises(EngineError, match="--speculative-algorithm EAGLE3"),
    ):
        measure_running(
            "sglang", server.url, None, project, SERVE, Path("measured"), ConsoleReporter()
        )
