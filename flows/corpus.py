"""The corpus stage: chats become rows of tokens that the target itself answered."""

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import Params
from tasks.corpus import corpus
from tasks.prefect_lazy import flow
from tasks.stage import run_stage


@flow(name="corpus")
def corpus_flow(params: Params) -> Corpus:
    """Read the sources, let the target answer, split, and mask what is not supervised."""
    target = TargetModel.load(TargetModel.home)
    return corpus(target, params.corpus, params.extract, params.target, Corpus.home)


if __name__ == "__main__":  # what dvc.yaml runs
    run_stage("corpus", corpus_flow)
