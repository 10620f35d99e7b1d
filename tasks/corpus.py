"""How the corpus stage runs: retried once, since answers that are written are not lost."""

from pathlib import Path

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import CorpusParams, TargetParams
from eagle3.corpus.build import build_corpus
from eagle3.engines.transformers import TransformersEngine
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter


@task(name="build-corpus", retries=1)
def corpus(
    target: TargetModel, params: CorpusParams, target_params: TargetParams, out: Path
) -> Corpus:
    """Build the corpus; the target answers through transformers."""
    engine = TransformersEngine(target, target_params)
    return build_corpus(target, params, engine, out, StageReporter("corpus"))
