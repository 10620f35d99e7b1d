"""How the vocab stage runs: once, in seconds."""

from pathlib import Path

from eagle3.artifacts import Corpus, DraftVocab, TargetModel
from eagle3.config import VocabParams, VocabSize
from eagle3.vocab import select_vocab
from tasks.prefect_lazy import task


@task(name="select-vocab", retries=0)
def vocab(
    target: TargetModel,
    corpus: Corpus,
    params: VocabParams,
    size: VocabSize,
    init_from: str | None,
    out: Path,
) -> DraftVocab:
    """Select the draft vocabulary of one size."""
    return select_vocab(target, corpus, params, size, init_from, out)
