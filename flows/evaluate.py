"""The evaluate stage, once per size: what the drafter is worth on prompts it has never seen."""

from eagle3.artifacts import Corpus, Drafter, Evaluation, HiddenStates, TargetModel
from eagle3.config import Params, VocabSize
from tasks.evaluate import evaluate
from tasks.prefect_lazy import flow
from tasks.stage import run_sized_stage


@flow(name="evaluate")
def evaluate_flow(params: Params, size: VocabSize) -> Evaluation:
    """Measure acceptance by replay and by the real loop, and the cost of the steps."""
    target = TargetModel.load(TargetModel.home)
    corpus = Corpus.load(Corpus.home)
    states = HiddenStates.load(HiddenStates.home)
    drafter = Drafter.load(Drafter.home(size))
    return evaluate(
        target, corpus, states, drafter, params.evaluate, params.target, Evaluation.home(size)
    )


if __name__ == "__main__":  # what dvc.yaml runs
    run_sized_stage("evaluate", evaluate_flow)
