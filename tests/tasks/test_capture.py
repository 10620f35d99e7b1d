"""corpus, extract, vocab, train and evaluate with `extract.capture_answers`, as the stages run."""

import logging
from pathlib import Path

import pytest
from tiny_pipeline import Inputs, train

from eagle3.artifacts import Corpus, Drafter, DraftVocab, Evaluation, HiddenStates, TargetModel
from eagle3.config import Params
from eagle3.evaluate import evaluate_drafter
from eagle3.progress import ConsoleReporter
from eagle3.target import bring_target
from eagle3.vocab import select_vocab
from tasks.corpus import corpus
from tasks.extract import extract

SIZE = 128


@pytest.fixture
def params(tiny_params: Params) -> Params:
    captured = tiny_params.extract.model_copy(update={"capture_answers": True})
    every = tiny_params.evaluate.model_copy(update={"loop_prompts": 100})
    return tiny_params.model_copy(update={"extract": captured, "evaluate": every})


def test_a_drafter_is_trained_and_evaluated_on_states_that_no_pass_was_made_for(
    params: Params,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = bring_target(params.target, TargetModel.home)
    with caplog.at_level(logging.INFO, logger="eagle3.captured.take"):
        rows = corpus(target, params.corpus, params.extract, params.target, Corpus.home)
        states = extract(target, rows, params.extract, params.target, HiddenStates.home)
    all_tokens = sum(rows.tokens.values())
    assert f"{all_tokens} of {all_tokens} tokens have states" in caplog.text
    assert not any(Path(".work").glob("captured-*"))

    vocab = select_vocab(target, rows, params.vocab, SIZE, None, DraftVocab.home(SIZE))
    drafter = train(Inputs(target, rows, states, vocab), params)
    assert Drafter.load(Drafter.home(SIZE)) == drafter
    home = Evaluation.home(SIZE)
    report = ConsoleReporter()
    found = evaluate_drafter(
        target, rows, states, drafter, params.evaluate, params.target, home, report
    )
    # The loop runs the target anew, token by token; replay reads the captured states.
    assert found.metrics["loop_replay_disagreements"] == 0
