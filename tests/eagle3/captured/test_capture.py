"""From the corpus to the store with states captured on the way: the same rows, the same states."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle3.artifacts import SPLITS, Corpus, HiddenStates, TargetModel
from eagle3.captured.place import captured_folder
from eagle3.captured.take import captured_first, find_captured
from eagle3.config import ExtractParams, Params, check_params
from eagle3.corpus.build import build_corpus
from eagle3.corpus.capture import AnswerCapture
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import SilentReporter
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore
from eagle3.target import bring_target

# Of the largest value of a state: float32 as the tiny target computes it, and as bfloat16 keeps it.
ROUNDING = {"float32": 2e-5, "bfloat16": 2**-8}


class Counted:
    """The real engine, which notes how many tokens of rows it ran, and may be stopped."""

    def __init__(self, engine: TransformersEngine, stop_after: int | None = None) -> None:
        self.name, self.engine, self.stop_after = engine.name, engine, stop_after
        self.tokens: list[list[int]] = []
        self.calls = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("what is captured is generated with states")

    def generate_with_states(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[list[list[int]], list[RowStates | None]]:
        if self.calls == self.stop_after:
            raise KeyboardInterrupt
        self.calls += 1
        return self.engine.generate_with_states(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        self.tokens += [list(row) for row in rows]
        return self.engine.states(rows)


@pytest.fixture
def params(tiny_params: Params) -> Params:
    """Half of the tiny chats, of one and two questions, captured."""
    chats = Path(tiny_params.corpus.sources[0].path)
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:20]))
    return capturing(
        tiny_params, **{"corpus.answers.max_new_tokens": 8, "corpus.answers.batch_size": 16}
    )


@pytest.fixture
def target(tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    monkeypatch.chdir(tmp_path)
    return bring_target(tiny_params.target, TargetModel.home)


@pytest.fixture
def engine(target: TargetModel, tiny_params: Params) -> TransformersEngine:
    return TransformersEngine(target, tiny_params.target)


def capturing(params: Params, **changes: object) -> Params:
    """With capture on, and other values by dotted key."""
    raw = params.model_dump(mode="json")
    for key, value in {"extract.capture_answers": True, **changes}.items():
        *path, last = key.split(".")
        place = raw
        for part in path:
            place = place[part]
        place[last] = value
    return check_params(raw, "changed")


def make_corpus(target: TargetModel, params: Params, engine, captures: bool = True) -> Corpus:
    limit = params.corpus.max_length
    capture = AnswerCapture(target, engine, params.extract, limit) if captures else None
    report = SilentReporter()
    return build_corpus(target, params.corpus, engine, Corpus.home, report, capture)


def extract(target: TargetModel, corpus: Corpus, params: ExtractParams, engine) -> HiddenStates:
    with captured_first(target, engine, params) as either:
        return extract_hidden_states(
            target, corpus, params, either, HiddenStates.home, SilentReporter()
        )


def rows_of(split: str) -> list[list[int]]:
    rows = load_rows(Corpus.home / f"{split}.zarr")
    return [rows.tokens_N[rows.span(row)].tolist() for row in range(len(rows))]


def require_states_of_separate_passes(engine: TransformersEngine) -> None:
    for split in SPLITS:
        store = StateStore.open(HiddenStates.home / f"{split}.zarr")
        rows = load_rows(Corpus.home / f"{split}.zarr")
        for row, tokens in enumerate(rows_of(split)):
            span = rows.span(row)
            [alone] = engine.states([tokens])
            expected = (alone.aux_T3H, alone.last_TH)
            for mine, theirs in zip(store.read(span.start, span.stop), expected, strict=True):
                largest = theirs.abs().amax(dim=-1, keepdim=True)
                off_by = ((mine.float() - theirs).abs() / largest).max()
                assert off_by < ROUNDING[store.header.dtype]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_corpus_is_the_same_with_and_without_capture(target, params, engine):
    plain = make_corpus(target, params, engine, captures=False)
    people = (Corpus.home / "conversations.jsonl").read_bytes()
    captured = make_corpus(target, params, Counted(engine))

    assert captured == plain
    assert (Corpus.home / "conversations.jsonl").read_bytes() == people


def test_nothing_that_was_answered_is_run_again_and_states_are_those_of_separate_passes(
    target, params, engine
):
    counted = Counted(engine)
    corpus = make_corpus(target, params, counted)
    states = extract(target, corpus, params.extract, counted)

    assert counted.tokens == []
    assert states.engine == f"{engine.name}, answers as they were written"
    assert states.dtype == {"train": "bfloat16", "validation": "bfloat16", "eval": "float32"}
    require_states_of_separate_passes(engine)


def test_captured_states_that_are_no_numbers_are_not_kept_and_their_rows_are_run(
    target, params, engine
):
    class Poisoned(Counted):
        def generate_with_states(
            self, prompts: Sequence[Sequence[int]], sampling: Sampling
        ) -> tuple[list[list[int]], list[RowStates | None]]:
            answers, found = super().generate_with_states(prompts, sampling)
            if self.calls == 1 and found[0] is not None:
                found[0].last_TH[-1, 0] = float("nan")
            return answers, found

    counted = Poisoned(engine)
    corpus = make_corpus(target, params, counted)
    states = extract(target, corpus, params.extract, counted)

    assert len(counted.tokens) == 1
    assert set(states.refused_rows.values()) == {0}
    require_states_of_separate_passes(engine)


def test_answers_that_the_source_brought_are_run(target, params, engine):
    params = capturing(params, **{"corpus.answers.by": "dataset"})
    counted = Counted(engine)
    corpus = make_corpus(target, params, counted)
    extract(target, corpus, params.extract, counted)

    assert counted.tokens == rows_of("train")
    require_states_of_separate_passes(engine)


def test_rows_that_were_cut_are_taken_and_those_that_end_unanswered_are_run(target, params, engine):
    # Some second questions end beyond this, and some answers begin before it and end after it.
    params, counted = capturing(params, **{"corpus.max_length": 72}), Counted(engine)
    corpus = make_corpus(target, params, counted)
    extract(target, corpus, params.extract, counted)

    rows = [row for split in SPLITS for row in rows_of(split)]
    assert corpus.counts["truncated"] > len(counted.tokens) > 0
    assert all(row in rows and len(row) == 72 for row in counted.tokens)
    require_states_of_separate_passes(engine)


def test_captured_states_of_other_answers_are_not_taken(target, params, engine):
    make_corpus(target, params, Counted(engine))
    other = capturing(params, **{"corpus.answers.seed": 1})
    corpus, counted = make_corpus(target, other, engine, captures=False), Counted(engine)
    extract(target, corpus, other.extract, counted)

    train = rows_of("train")
    assert all(row in train for row in counted.tokens)
    assert len(counted.tokens) > len(train) / 2
    require_states_of_separate_passes(engine)


def test_bfloat16_states_are_not_taken_for_a_row_that_is_now_eval(target, params, engine):
    greedy = {"corpus.answers.temperature": 0.0}
    mostly_train = {"corpus.validation_fraction": 0.1, "corpus.eval_fraction": 0.1}
    make_corpus(target, capturing(params, **greedy, **mostly_train), Counted(engine))
    params = capturing(params, **greedy, **{"corpus.eval_fraction": 0.6})
    corpus, counted = make_corpus(target, params, engine, captures=False), Counted(engine)
    extract(target, corpus, params.extract, counted)

    assert counted.tokens
    held_out = rows_of("eval")
    assert all(row in held_out for row in counted.tokens)
    require_states_of_separate_passes(engine)


def test_without_captured_states_every_row_is_run_and_the_store_says_nothing_of_them(
    target, params, engine, caplog
):
    counted = Counted(engine)
    corpus = make_corpus(target, params, engine, captures=False)
    with caplog.at_level(logging.INFO, logger="eagle3.captured.take"):
        states = extract(target, corpus, params.extract, counted)

    assert counted.tokens == [row for split in SPLITS for row in rows_of(split)]
    assert states.engine == engine.name
    assert f"0 of {sum(corpus.tokens.values())} tokens have states" in caplog.text


def test_captured_states_are_removed_once_they_are_stored_and_not_before(target, params, engine):
    params = capturing(params, **{"extract.state_dtype": "float8"})
    # What is there already, of a run with other chunks, is made anew.
    make_corpus(target, capturing(params, **{"extract.chunk_tokens": 32}), Counted(engine))
    corpus = make_corpus(target, params, Counted(engine))
    with (
        pytest.raises(KeyboardInterrupt),
        captured_first(target, engine, params.extract),
    ):
        raise KeyboardInterrupt
    folder = captured_folder(target, engine.name, params.extract)
    assert find_captured(folder, params.extract)
    counted = Counted(engine)
    extract(target, corpus, params.extract, counted)

    assert counted.tokens == []
    assert not any(Path(".work").iterdir())


@pytest.mark.parametrize("file", ["aux/c.0.0.0.0", "shards/00000.json"])
def test_damaged_states_are_said_and_their_rows_run(target, params, engine, caplog, file):
    counted = Counted(engine)
    corpus = make_corpus(target, params, counted)
    folder = captured_folder(target, engine.name, params.extract)
    path = next(folder.glob("train/*.zarr")) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    with caplog.at_level(logging.INFO, logger="eagle3.captured.take"):
        extract(target, corpus, params.extract, counted)

    assert 0 < len(counted.tokens) < len(rows_of("train"))
    assert "rows are run again" in caplog.text
    require_states_of_separate_passes(engine)
