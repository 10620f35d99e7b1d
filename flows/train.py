"""The train stage, once per size: train the drafter."""

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params, VocabSize
from tasks.prefect_lazy import flow
from tasks.stage import run_sized_stage
from tasks.train import train


@flow(name="train")
def train_flow(params: Params, size: VocabSize) -> Drafter:
    """Train a drafter on the target's hidden states and keep the best checkpoint."""
    target = TargetModel.load(TargetModel.home)
    corpus = Corpus.load(Corpus.home)
    states = HiddenStates.load(HiddenStates.home)
    vocab = DraftVocab.load(DraftVocab.home(size))
    return train(target, corpus, states, vocab, params, Drafter.home(size))


if __name__ == "__main__":  # what dvc.yaml runs
    run_sized_stage("train", train_flow)
