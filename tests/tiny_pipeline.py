"""What the stages before training make of the tiny target, for tests that start there."""

from dataclasses import dataclass

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params, VocabSize
from eagle3.corpus.build import build_corpus
from eagle3.engines.base import TargetEngine
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter, Reporter
from eagle3.stream import Streaming
from eagle3.target import bring_target
from eagle3.team import ALONE, Team
from eagle3.train import train_drafter
from eagle3.vocab import select_vocab


@dataclass(frozen=True)
class Inputs:
    """Records of everything that training reads, in the current directory."""

    target: TargetModel
    corpus: Corpus
    states: HiddenStates
    vocab: DraftVocab

    @classmethod
    def load(cls, size: VocabSize) -> "Inputs":
        """Those of the current directory."""
        return cls(
            TargetModel.load(TargetModel.home),
            Corpus.load(Corpus.home),
            HiddenStates.load(HiddenStates.home),
            DraftVocab.load(DraftVocab.home(size)),
        )


def make_inputs(params: Params, size: VocabSize) -> Inputs:
    """Run target, corpus, extract and vocab in the current directory."""
    report = ConsoleReporter()
    target = bring_target(params.target, TargetModel.home)
    engine = TransformersEngine(target, params.target)
    corpus = build_corpus(target, params.corpus, engine, Corpus.home, report)
    states = extract_hidden_states(
        target, corpus, params.extract, engine, HiddenStates.home, report
    )
    vocab = select_vocab(target, corpus, params.vocab, size, None, DraftVocab.home(size))
    return Inputs(target, corpus, states, vocab)


def train(
    inputs: Inputs,
    params: Params,
    report: Reporter | None = None,
    team: Team = ALONE,
    engine: TargetEngine | None = None,
) -> Drafter:
    """Run train in the current directory; `engine` makes the states where they are not stored."""
    extract = params.extract
    streaming = (
        Streaming(engine, extract.ahead_shards, extract.max_nonfinite_rows) if engine else None
    )
    return train_drafter(
        inputs.target,
        inputs.corpus,
        inputs.states,
        inputs.vocab,
        params.drafter,
        params.train,
        Drafter.home(inputs.vocab.size),
        report or ConsoleReporter(),
        team,
        streaming,
    )
