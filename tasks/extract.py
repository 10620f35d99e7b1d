"""How the extract stage runs: retried once, since finished shards are not lost."""

from pathlib import Path

import torch

from eagle3.artifacts import Corpus, HiddenStates, TargetModel
from eagle3.captured.take import captured_first
from eagle3.config import ExtractParams, TargetParams
from eagle3.engines.backend import open_engine
from eagle3.extract import extract_by, extract_hidden_states, longest_row
from eagle3.ray_worker import WorkerJob
from eagle3.ray_workers import ray_workers
from eagle3.work import WORK
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter


@task(name="extract-hidden-states", retries=1)
def extract(
    target: TargetModel,
    corpus: Corpus,
    params: ExtractParams,
    target_params: TargetParams,
    out: Path,
) -> HiddenStates:
    """Extract the hidden states; the target runs in the engine that params name, here or on Ray."""
    report = StageReporter("extract")
    if params.on_ray:
        job = WorkerJob(
            folder=Path.cwd(),
            target=target,
            params=target_params,
            threads=torch.get_num_threads(),
        )
        with ray_workers(job, params.workers, params.ray_address, target_params.device) as workers:
            return extract_by(target, corpus, params, workers.engine, workers.fill, out, report)
    # An engine that answers wants room for a token after the row.
    longest = longest_row() + 1
    log_file = WORK / "vllm-extract.log"
    with open_engine(params.backend, target, target_params, longest, log_file) as engine:
        if not params.capture_answers:
            return extract_hidden_states(target, corpus, params, engine, out, report)
        with captured_first(target, engine, params) as either:
            return extract_hidden_states(target, corpus, params, either, out, report)
