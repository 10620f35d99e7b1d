"""The vocab stage, once per size: choose the draft vocabulary."""

from eagle3.artifacts import Corpus, DraftVocab, TargetModel
from eagle3.config import Params, VocabSize
from tasks.prefect_lazy import flow
from tasks.stage import run_sized_stage
from tasks.vocab import vocab


@flow(name="vocab")
def vocab_flow(params: Params, size: VocabSize) -> DraftVocab:
    """Choose the tokens that the drafter may draft, and measure what they cover."""
    target = TargetModel.load(TargetModel.home)
    corpus = Corpus.load(Corpus.home)
    home = DraftVocab.home(size)
    return vocab(target, corpus, params.vocab, size, params.train.init_from, home)


if __name__ == "__main__":  # what dvc.yaml runs
    run_sized_stage("vocab", vocab_flow)
