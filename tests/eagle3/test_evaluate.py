"""A drafter of the tiny target, evaluated from what the earlier stages left."""

import csv
import json
import shutil

import pytest

from eagle3.artifacts import Corpus, Drafter, DraftVocab, Evaluation, HiddenStates, TargetModel
from eagle3.contract import WEIGHTS_FILE
from eagle3.corpus.build import build_corpus
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import ArtifactError, CheckpointError
from eagle3.evaluate import evaluate_drafter
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import load_rows
from eagle3.target import bring_target
from eagle3.train import train_drafter
from eagle3.vocab import select_vocab

SIZE = 128
MADE = {}
"""The pipeline's folder, made by the first test: its params name files of that test's tmp_path."""


@pytest.fixture
def pipeline(tiny_params, tmp_path_factory, monkeypatch):
    """Params, and a current directory that holds everything up to a drafter, not to be changed."""
    if not MADE:
        train = tiny_params.train.model_copy(update={"total_steps": 40, "learning_rate": 4e-3})
        # Every eval row goes through the loop, so that its figures are those of replay.
        every = tiny_params.evaluate.model_copy(update={"loop_prompts": 100})
        MADE["params"] = tiny_params.model_copy(update={"train": train, "evaluate": every})
        MADE["folder"] = tmp_path_factory.mktemp("pipeline")
        monkeypatch.chdir(MADE["folder"])
        make_drafter(MADE["params"])
    monkeypatch.chdir(MADE["folder"])
    return MADE["params"]


@pytest.fixture
def own_pipeline(pipeline, tmp_path, monkeypatch):
    """The same in a copy of the folder, to be changed."""
    monkeypatch.chdir(shutil.copytree(MADE["folder"], tmp_path / "copy"))
    return pipeline


def make_drafter(params):
    report = ConsoleReporter()
    target = bring_target(params.target, TargetModel.home)
    engine = TransformersEngine(target, params.target)
    corpus = build_corpus(target, params.corpus, engine, Corpus.home, report)
    states = extract_hidden_states(
        target, corpus, params.extract, engine, HiddenStates.home, report
    )
    vocab = select_vocab(target, corpus, params.vocab, SIZE, None, DraftVocab.home(SIZE))
    home = Drafter.home(SIZE)
    train_drafter(target, corpus, states, vocab, params.drafter, params.train, home, report)


def evaluate(params, out, **changes):
    records = {
        "target": TargetModel.load(TargetModel.home),
        "corpus": Corpus.load(Corpus.home),
        "states": HiddenStates.load(HiddenStates.home),
        "drafter": Drafter.load(Drafter.home(SIZE)),
    }
    return evaluate_drafter(
        **(records | changes),
        params=params.evaluate,
        target_params=params.target,
        out=out,
        report=ConsoleReporter(),
    )


@pytest.fixture
def evaluation(pipeline, tmp_path):
    """The drafter's evaluation and its details."""
    if "evaluation" not in MADE:
        made = evaluate(pipeline, tmp_path / "out")
        MADE["evaluation"] = (made, tmp_path / "out")
    return MADE["evaluation"]


def test_replay_and_the_real_loop_agree_on_every_prompt(evaluation):
    metrics = evaluation[0].metrics
    assert metrics["loop_replay_disagreements"] == 0
    assert metrics["acceptance_length_loop_k3"] == metrics["acceptance_length_k3"]
    details = json.loads((evaluation[1] / "evaluation.json").read_text())
    for domain, figures in details["loop"]["figures"].items():
        assert figures.items() <= details["replay"]["3"][domain].items()


def test_the_loop_takes_the_first_rows_of_each_domain(pipeline, evaluation, tmp_path):
    few = pipeline.evaluate.model_copy(update={"loop_prompts": 1})
    found = evaluate(pipeline.model_copy(update={"evaluate": few}), tmp_path / "few")
    assert found.metrics["loop_rows"] == 2
    assert found.metrics["acceptance_length_k3"] == evaluation[0].metrics["acceptance_length_k3"]


def test_the_loop_writes_the_targets_greedy_text(evaluation):
    metrics = evaluation[0].metrics
    assert metrics["loop_text_differences"] == 0
    assert metrics["not_greedy_tokens"] == 0


def test_the_drafter_of_these_tests_is_sometimes_right_and_sometimes_wrong(evaluation):
    metrics = evaluation[0].metrics
    assert 1 < metrics["acceptance_length_k3"] < 3.8
    assert 0 < metrics["sampled_acceptance_pos0"] < 1


def test_figures_have_the_names_that_design_gives_them(evaluation):
    assert {
        "acceptance_length_k1",
        "acceptance_length_k3",
        "acceptance_length_loop_k3",
        "acceptance_rate_k3_pos0",
        "acceptance_rate_k3_pos1",
        "acceptance_rate_k3_pos2",
        "oov_miss_rate",
        "draft_step_us",
        "draft_layer_us",
        "draft_head_us",
        "target_step_us",
        "speedup_projected_k3",
    } <= evaluation[0].figures.keys()


def test_speedup_follows_from_the_measured_costs(evaluation):
    figures = evaluation[0].figures
    verify = figures["verify_step_us_k3"] / figures["target_step_us"]
    draft = figures["draft_step_us"] / figures["target_step_us"]
    expected = figures["acceptance_length_k3"] / (verify + 3 * draft)
    assert figures["speedup_projected_k3"] == pytest.approx(expected)


def test_domains_add_up_to_the_whole_split(evaluation):
    details = json.loads((evaluation[1] / "evaluation.json").read_text())
    for by_domain in (*details["replay"].values(), details["loop"]["figures"]):
        assert set(by_domain) == {"overall", "chat", "held-out"}
        for count in ("drafts", "accepted"):
            parts = by_domain["chat"][count] + by_domain["held-out"][count]
            assert by_domain["overall"][count] == parts


def test_the_plot_has_a_point_for_each_k_and_domain(evaluation):
    text = (evaluation[1] / "acceptance.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [(row["k"], row["domain"]) for row in rows] == [
        (k, domain) for k in ("1", "3") for domain in ("overall", "chat", "held-out")
    ]
    assert float(rows[3]["acceptance_length"]) == pytest.approx(
        evaluation[0].metrics["acceptance_length_k3"], abs=1e-6
    )


def test_every_answer_without_an_end_token_counts_as_truncated(evaluation):
    details = json.loads((evaluation[1] / "evaluation.json").read_text())
    rows = load_rows(MADE["folder"] / Corpus.home / "eval.zarr")
    end = 2
    ends = [
        int(token) == end
        for token, here, after in zip(
            rows.tokens_N, rows.loss_mask_N, [*rows.loss_mask_N[1:], False], strict=True
        )
        if here and not after
    ]
    assert details["answers"] == len(ends)
    assert details["truncated_answers"] == ends.count(False)


def test_the_record_lies_beside_its_details_and_names_what_it_was_made_from(evaluation):
    made, out = evaluation
    assert Evaluation.load(out) == made
    assert set(made.made_from) == {"target", "corpus", "extract", "train"}


def test_states_of_another_corpus_are_refused(pipeline, tmp_path):
    corpus = Corpus.load(Corpus.home)
    other = corpus.model_copy(update={"counts": {**corpus.counts, "read": 999}})
    with pytest.raises(ArtifactError, match="run `dvc repro extract`"):
        evaluate(pipeline, tmp_path, corpus=other)


def test_a_drafter_of_other_states_is_refused(pipeline, tmp_path):
    drafter = Drafter.load(Drafter.home(SIZE))
    other = drafter.model_copy(update={"made_from": {**drafter.made_from, "extract": "0" * 64}})
    with pytest.raises(ArtifactError, match="run `dvc repro train"):
        evaluate(pipeline, tmp_path, drafter=other)


def test_a_drafter_of_another_vocabulary_than_params_ask_for_is_refused(pipeline, tmp_path):
    other = Drafter.load(Drafter.home(SIZE)).model_copy(update={"draft_vocab": 64})
    with pytest.raises(
        CheckpointError, match=r"draft_vocab 64, but size 128 is 128 .*dvc repro --force"
    ):
        evaluate(pipeline, tmp_path, drafter=other)


def test_weights_that_are_not_those_of_the_record_are_refused(own_pipeline, tmp_path):
    weights = Drafter.home(SIZE) / WEIGHTS_FILE
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.unlink()  # it may be a hard link to the original
    weights.write_bytes(changed)
    with pytest.raises(CheckpointError, match="run `dvc repro --force train@128`"):
        evaluate(own_pipeline, tmp_path / "out")
