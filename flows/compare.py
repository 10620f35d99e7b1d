"""The compare stage: which draft vocabulary to use, and what would change the answer."""

from eagle3.artifacts import Decision, DraftVocab, Evaluation
from eagle3.config import Params
from tasks.compare import compare
from tasks.prefect_lazy import flow
from tasks.stage import run_stage


@flow(name="compare")
def compare_flow(params: Params) -> Decision:
    """Put the sizes side by side and decide at each k."""
    evaluations = [Evaluation.load(Evaluation.home(size)) for size in params.vocab.sizes]
    vocabs = [DraftVocab.load(DraftVocab.home(size)) for size in params.vocab.sizes]
    return compare(evaluations, vocabs, Decision.home)


if __name__ == "__main__":  # what dvc.yaml runs
    run_stage("compare", compare_flow)
