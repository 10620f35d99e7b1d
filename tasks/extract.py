"""How the extract stage runs: retried once, since finished shards are not lost."""

from pathlib import Path

from eagle3.artifacts import Corpus, HiddenStates, TargetModel
from eagle3.config import ExtractParams, TargetParams
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
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
    """Extract the hidden states; the target runs through transformers."""
    engine = TransformersEngine(target, target_params)
    return extract_hidden_states(target, corpus, params, engine, out, StageReporter("extract"))
