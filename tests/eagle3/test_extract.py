"""The extract stage: states of every token, one pass a row, and a resume that costs little."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from listeners import Listener
from tiny_corpus import rows_of, save_corpus

from eagle3.artifacts import Corpus, HiddenStates, Split, TargetModel
from eagle3.config import ExtractParams, TargetParams
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import ArtifactError
from eagle3.extract import extract_hidden_states
from eagle3.fill import TOKENS_A_CALL, calls
from eagle3.store.states import StateStore
from eagle3.target import bring_target

PARAMS = ExtractParams(
    backend="transformers",
    state_dtype="bfloat16",
    eval_state_dtype="float32",
    chunk_tokens=4,
    shard_tokens=16,
    store=None,
    max_nonfinite_rows=0,
    workers=1,
    ray_address=None,
    keep=True,
    ahead_shards=1,
    capture_answers=False,
)
LENGTHS: dict[Split, list[int]] = {"train": [5, 9, 6, 20, 3], "validation": [16], "eval": [7, 4]}


class FailingEngine:
    """The real engine until a row comes up that it is told to stop at."""

    def __init__(self, engine: TransformersEngine, stop_at: int) -> None:
        self.name, self.engine, self.stop_at = engine.name, engine, stop_at
        self.rows: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("extraction generates nothing")

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        for row in rows:
            if len(row) == self.stop_at:
                raise KeyboardInterrupt
            self.rows.append(len(row))
        return self.engine.states(rows)


@pytest.fixture
def target(
    tiny_target_params: TargetParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TargetModel:
    monkeypatch.chdir(tmp_path)
    return bring_target(tiny_target_params, TargetModel.home)


@pytest.fixture
def engine(target: TargetModel, tiny_target_params: TargetParams) -> TransformersEngine:
    return TransformersEngine(target, tiny_target_params)


@pytest.fixture
def corpus(target: TargetModel) -> Corpus:
    return save_corpus(target, LENGTHS)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_token_has_the_states_that_the_engine_gives(
    target: TargetModel, corpus: Corpus, engine: TransformersEngine
) -> None:
    states = extract_hidden_states(
        target, corpus, PARAMS, engine, HiddenStates.home, report=Listener()
    )

    assert HiddenStates.load(HiddenStates.home) == states
    assert states.tokens == {split: sum(lengths) for split, lengths in LENGTHS.items()}
    for split, dtype in states.dtype.items():
        store, rows = StateStore.open(HiddenStates.home / f"{split}.zarr"), rows_of(LENGTHS[split])
        assert states.sha256[split] == store.sha256
        for row in range(len(rows)):
            span = rows.span(row)
            [expected] = engine.states([rows.tokens_N[span].tolist()])
            aux_T3H, last_TH = store.read(span.start, span.stop)
            assert torch.equal(aux_T3H, expected.aux_T3H.to(getattr(torch, dtype)))
            assert torch.equal(last_TH, expected.last_TH.to(getattr(torch, dtype)))
    assert states.dtype == {"train": "bfloat16", "validation": "bfloat16", "eval": "float32"}


def test_each_row_is_run_once_and_progress_ends_at_the_number_of_tokens(
    target: TargetModel, corpus: Corpus, engine: TransformersEngine
) -> None:
    counting, listener = FailingEngine(engine, stop_at=-1), Listener()
    extract_hidden_states(target, corpus, PARAMS, counting, HiddenStates.home, listener)

    assert counting.rows == [length for lengths in LENGTHS.values() for length in lengths]
    assert listener.steps[-1] == (70, 70)
    assert listener.steps == sorted(listener.steps)


@pytest.mark.parametrize("stop_at", [20, 3, 4])
def test_a_stopped_run_goes_on_and_its_bytes_are_those_of_an_undisturbed_one(
    target: TargetModel, corpus: Corpus, engine: TransformersEngine, stop_at: int
) -> None:
    args = (target, corpus, PARAMS)
    whole = extract_hidden_states(*args, engine, Path("whole"), Listener())
    with pytest.raises(KeyboardInterrupt):
        extract_hidden_states(*args, FailingEngine(engine, stop_at), Path("resumed"), Listener())
    rest = FailingEngine(engine, stop_at=-1)
    resumed = extract_hidden_states(*args, rest, Path("resumed"), Listener())

    assert resumed == whole
    assert files_of(Path("resumed")) == files_of(Path("whole"))
    # Shards end at tokens 16, 32 and 43: what lies wholly in finished ones is not run again.
    not_again = {20: [5, 9], 3: [5, 9, 6], 4: [5, 9, 6, 20, 3, 16]}[stop_at]
    assert (
        rest.rows
        == [length for lengths in LENGTHS.values() for length in lengths][len(not_again) :]
    )


def test_nothing_is_left_in_the_work_folder(
    target: TargetModel, corpus: Corpus, engine: TransformersEngine
) -> None:
    extract_hidden_states(target, corpus, PARAMS, engine, HiddenStates.home, Listener())

    assert list(Path(".work").iterdir()) == []


def test_a_corpus_of_another_target_is_refused(
    target: TargetModel, corpus: Corpus, engine: TransformersEngine
) -> None:
    other = corpus.model_copy(update={"made_from": {"target": "0" * 64}})

    with pytest.raises(ArtifactError, match=r"run `dvc repro corpus`"):
        extract_hidden_states(target, other, PARAMS, engine, HiddenStates.home, Listener())


def test_a_row_across_shards_is_a_call_alone() -> None:
    rows = rows_of([5, 9, 6, 20, 3, 2, 3, 16, 4])

    # Shards start at tokens 0, 16, 32, 48 and 64.
    assert list(calls(rows, 16)) == [[0, 1], [2], [3], [4, 5, 6], [7], [8]]


def test_calls_hold_every_row_once_and_not_too_many_tokens() -> None:
    draw = np.random.default_rng(0)
    rows = rows_of(draw.integers(1, 900, size=200).tolist())
    found = list(calls(rows, 8192))

    assert [row for call in found for row in call] == list(range(200))
    lengths = np.diff(rows.offsets_R1)
    assert all(lengths[call].sum() <= TOKENS_A_CALL for call in found)
    assert list(calls(replace(rows), 8192)) == found


def test_the_calls_for_a_shard_follow_from_its_own_rows() -> None:
    draw = np.random.default_rng(0)
    rows = rows_of([*draw.integers(1, 40, size=100).tolist(), 16, 16, 50, 14])
    everything = list(calls(rows, 16))

    for start in range(0, rows.num_tokens, 16):
        stop = min(start + 16, rows.num_tokens)
        own = [
            row
            for row in range(len(rows))
            if rows.span(row).start < stop and rows.span(row).stop > start
        ]
        expected = [call for call in everything if set(call) & set(own)]
        assert list(calls(rows, 16, range(own[0], own[-1] + 1))) == expected
