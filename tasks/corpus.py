"""How the corpus stage runs: retried once, since answers that are written are not lost."""

from pathlib import Path

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import CorpusParams, ExtractParams, TargetParams
from eagle3.corpus.build import build_corpus
from eagle3.corpus.capture import AnswerCapture
from eagle3.engines.backend import open_engine
from eagle3.engines.base import CapturingEngine
from eagle3.work import WORK
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter


@task(name="build-corpus", retries=1)
def corpus(
    target: TargetModel,
    params: CorpusParams,
    extract: ExtractParams,
    target_params: TargetParams,
    out: Path,
) -> Corpus:
    """Build the corpus; the target answers through the engine that params name.

    What `extract` says decides what is kept for the next stage, and nothing of the corpus.
    """
    log_file = WORK / "vllm-corpus.log"
    backend, longest = params.answers.backend, params.longest_text
    with open_engine(backend, target, target_params, longest, log_file) as engine:
        capture = None
        if extract.capture_answers:
            assert isinstance(engine, CapturingEngine), f"{engine.name} keeps no states"
            capture = AnswerCapture(target, engine, extract, params.max_length)
        return build_corpus(target, params, engine, out, StageReporter("corpus"), capture)
