"""The extract stage: the target reads the corpus, and its hidden states are kept."""

from eagle3.artifacts import Corpus, HiddenStates, TargetModel
from eagle3.config import Params
from tasks.extract import extract
from tasks.prefect_lazy import flow
from tasks.stage import run_stage


@flow(name="extract")
def extract_flow(params: Params) -> HiddenStates:
    """Run the target over the corpus and keep what the drafter will read."""
    target = TargetModel.load(TargetModel.home)
    corpus = Corpus.load(Corpus.home)
    return extract(target, corpus, params.extract, params.target, HiddenStates.home)


if __name__ == "__main__":  # what dvc.yaml runs
    run_stage("extract", extract_flow)
