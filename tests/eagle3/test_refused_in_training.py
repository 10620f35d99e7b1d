"""Training without the rows that were refused: stored, streamed, stopped and resumed alike."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from listeners import StopAt
from poisoned import PoisonedEngine
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.artifacts import Corpus, Drafter, HiddenStates, TargetModel
from eagle3.batches import read_batch
from eagle3.config import Params
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import StoreError
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import load_rows
from eagle3.stream_plan import first_epoch
from eagle3.trainer import Trainer

SIZE = 128


def bad_rows(params: Params) -> tuple[int, int, int]:
    """Rows of train that are read second, seventh and last in an epoch."""
    lengths = np.diff(load_rows(Corpus.home / "train.zarr").offsets_R1).tolist()
    order = first_epoch(lengths, params.train)
    return order[1], order[6], order[-1]


def poisoned_engine(target: TargetModel, params: Params) -> PoisonedEngine:
    """The real target, but for one value of each bad row."""
    bad = []
    for split, numbers in {"train": bad_rows(params), "validation": (0,)}.items():
        rows = load_rows(Corpus.home / f"{split}.zarr")
        bad += [rows.tokens_N[rows.span(number)].tolist() for number in numbers]
    return PoisonedEngine(TransformersEngine(target, params.target), bad)


def options(params: Params, keep: bool, limit: int = 3, steps: int = 12) -> Params:
    extract = {"keep": keep, "ahead_shards": 1, "chunk_tokens": 16, "shard_tokens": 64}
    train_params = {"batch_tokens": 256, "total_steps": steps, "validate_every": 4}
    return params.model_copy(
        update={
            "extract": params.extract.model_copy(update=extract | {"max_nonfinite_rows": limit}),
            "train": params.train.model_copy(update=train_params),
        }
    )


def extracted(inputs: Inputs, params: Params) -> Inputs:
    """The same inputs with states that lack the bad rows."""
    shutil.rmtree(HiddenStates.home, ignore_errors=True)
    states = extract_hidden_states(
        inputs.target,
        inputs.corpus,
        params.extract,
        poisoned_engine(inputs.target, params),
        HiddenStates.home,
        ConsoleReporter(),
    )
    return replace(inputs, states=states)


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    return {}


@pytest.fixture
def inputs(
    made: dict[str, Path],
    tiny_params: Params,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Inputs:
    """All that training reads, in a copy that is the current directory; nothing is refused."""
    monkeypatch.chdir(tmp_path)
    if "folder" not in made:
        made["folder"] = tmp_path_factory.mktemp("refused")
        os.chdir(made["folder"])
        make_inputs(options(tiny_params, True), SIZE).states.save(HiddenStates.home)
    monkeypatch.chdir(shutil.copytree(made["folder"], tmp_path / "project"))
    return Inputs.load(SIZE)


def trainer_of(inputs: Inputs, params: Params, folder: Path) -> Trainer:
    return Trainer(
        inputs.target, inputs.vocab, params.drafter, params.train, folder, ConsoleReporter()
    )


def gradients(
    trainer: Trainer, batches: Sequence[Sequence[int]]
) -> tuple[float, dict[str, torch.Tensor]]:
    read = trainer.train_store.read_rows
    loss, _ = trainer.backward(
        [read_batch(trainer.train_rows, read, which, trainer.device) for which in batches]
    )
    found = {n: p.grad.clone() for n, p in trainer.net.named_parameters() if p.grad is not None}
    trainer.net.zero_grad()
    return loss, found


@pytest.mark.parametrize("hot", [False, True], ids=["plain", "hot"])
def test_a_batch_with_a_refused_row_has_the_loss_and_gradient_of_the_batch_without_it(
    inputs: Inputs, tiny_params: Params, tmp_path: Path, hot: bool
) -> None:
    params = options(tiny_params, True)
    trainer = trainer_of(extracted(inputs, params), params, tmp_path)
    if hot:
        trainer.use_hot_path()
    bad = bad_rows(params)[0]
    one, other = [row for row in range(5) if row not in bad_rows(params)][:2]
    loss, without = gradients(trainer, [(one, other)])
    loss_too, beside = gradients(trainer, [(one, bad, other)])
    alone, nothing = gradients(trainer, [(bad,)])

    assert loss_too == pytest.approx(loss, rel=1e-6)
    for name, gradient in without.items():
        torch.testing.assert_close(beside[name], gradient, rtol=1e-5, atol=1e-6)
    assert alone == 0
    assert not any(gradient.any() for gradient in nothing.values())


def test_all_figures_say_how_many_rows_were_refused(inputs: Inputs, tiny_params: Params) -> None:
    params = options(tiny_params, True)
    inputs = extracted(inputs, params)
    drafter = train(inputs, params)

    assert inputs.states.refused_rows == {"train": 3, "validation": 1, "eval": 0}
    figures = inputs.states.figures
    assert (figures["refused_rows_train"], figures["refused_rows_validation"]) == (3, 1)
    assert drafter.figures["refused_rows_train"] == 3


def trained() -> tuple[str, dict[str, bytes]]:
    home = Drafter.home(SIZE)
    files = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*.safetensors")}
    return Drafter.curve_home(SIZE).read_text(), files


# An epoch is nine steps. A shard that no later step reads is deleted, with the names it had.
@pytest.mark.parametrize(("steps", "stop", "met"), [(12, None, 3), (12, 9, 3), (8, 7, 2)])
def test_a_streamed_run_leaves_out_the_rows_of_a_stored_one_and_counts_them_after_a_stop(
    inputs: Inputs, tiny_params: Params, steps: int, stop: int | None, met: int
) -> None:
    kept = options(tiny_params, True, steps=steps)
    stored = train(extracted(inputs, kept), kept)
    expected = trained()
    shutil.rmtree(Drafter.home(SIZE))
    params = options(tiny_params, False, steps=steps)
    streamed_inputs = extracted(inputs, params)
    engine = poisoned_engine(inputs.target, params)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            train(streamed_inputs, params, StopAt(stop), engine=engine)
        markers = Path(".work").glob("train-*/train.zarr/shards/*.json")
        second = load_rows(Corpus.home / "train.zarr").row_ids[bad_rows(params)[0]]
        assert not any(second in marker.read_text() for marker in markers)
    streamed = train(streamed_inputs, params, engine=engine)

    assert trained() == expected
    assert (stored.refused_rows, streamed.refused_rows) == (3, met)


def test_a_streamed_run_ends_above_the_limit_and_goes_on_when_it_is_raised(
    inputs: Inputs, tiny_params: Params
) -> None:
    few, enough = options(tiny_params, False, limit=2), options(tiny_params, False, limit=3)
    streamed_inputs = extracted(inputs, enough)
    engine = poisoned_engine(inputs.target, few)
    with pytest.raises(StoreError, match=r"3 rows of train .* allows 2: .*; set target.dtype"):
        train(streamed_inputs, few, engine=engine)
    with pytest.raises(StoreError, match=r"raise extract.max_nonfinite_rows to 3 or more"):
        train(streamed_inputs, few, engine=engine)
    before = len(engine.rows)

    assert train(streamed_inputs, enough, engine=engine).refused_rows == 3
    assert len(engine.rows) - before < len(load_rows(Corpus.home / "train.zarr"))


def test_more_refused_rows_of_validation_than_the_limit_fail_extraction(
    inputs: Inputs, tiny_params: Params
) -> None:
    with pytest.raises(StoreError, match=r"1 row of validation .* allows 0.*set target.dtype"):
        extracted(inputs, options(tiny_params, False, limit=0))
