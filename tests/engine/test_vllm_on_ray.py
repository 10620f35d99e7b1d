"""Two Ray workers with a vLLM server each fill one store with transformers' states."""

from pathlib import Path

import pytest
import torch

from eagle3.artifacts import SPLITS
from eagle3.config import ExtractParams
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_by
from eagle3.progress import ConsoleReporter
from eagle3.ray_worker import WorkerJob
from eagle3.ray_workers import ray_workers
from eagle3.store.states import StateStore


def test_states_of_two_servers_are_those_of_transformers(project):
    pytest.importorskip("ray", reason="pip install 'eagle3[ray]' runs this test")
    job = WorkerJob(
        folder=Path.cwd(),
        backend="vllm",
        target=project.target,
        params=project.target_params,
        longest=256,
        log_folder=Path("logs"),
        threads=1,
    )
    params = ExtractParams(
        backend="vllm",
        state_dtype="float32",
        eval_state_dtype="float32",
        chunk_tokens=64,
        shard_tokens=128,
        store=None,
        workers=2,
        ray_address=None,
    )
    with ray_workers(job, 2, None, "cpu") as workers:
        made = extract_by(
            *(project.target, project.corpus, params, workers.engine, workers.fill),
            *(Path("data/by-vllm"), ConsoleReporter()),
        )

    assert made.engine.startswith("vllm 0.")
    reference = TransformersEngine(project.target, project.target_params)
    for split in SPLITS:
        store = StateStore.open(Path(f"data/by-vllm/{split}.zarr"))
        for row in range(len(store.rows)):
            span = store.rows.span(row)
            [expected] = reference.states([store.rows.tokens_N[span].tolist()])
            aux_T3H, last_TH = store.read(span.start, span.stop)
            torch.testing.assert_close(aux_T3H, expected.aux_T3H, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last_TH, expected.last_TH, rtol=1e-3, atol=1e-3)
    assert len(list(Path("logs").glob("vllm-extract-*.log"))) == 2
