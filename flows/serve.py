"""The serve stage, once per size: what the drafter is worth inside a real serving engine."""

from eagle3.artifacts import Corpus, Drafter, HiddenStates, Serving, TargetModel
from eagle3.config import Params, VocabSize
from tasks.prefect_lazy import flow
from tasks.serve import serve
from tasks.stage import run_sized_stage


@flow(name="serve")
def serve_flow(params: Params, size: VocabSize) -> Serving:
    """Let the engine answer eval prompts with and without the drafter, and count."""
    target = TargetModel.load(TargetModel.home)
    corpus = Corpus.load(Corpus.home)
    states = HiddenStates.load(HiddenStates.home)
    drafter = Drafter.load(Drafter.home(size))
    return serve(target, corpus, states, drafter, params.serve, Serving.home(size))


if __name__ == "__main__":  # what dvc.yaml runs
    run_sized_stage("serve", serve_flow)
