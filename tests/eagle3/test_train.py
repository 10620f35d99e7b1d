"""Training of a tiny drafter: what it keeps, that it resumes exactly, and how batches add up."""

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.artifacts import Drafter, TargetModel
from eagle3.batches import read_batch, training_steps
from eagle3.check import check_drafter
from eagle3.checkpoint import load_drafter
from eagle3.config import Params
from eagle3.counts import parameter_table
from eagle3.errors import ArtifactError, TrainingError
from eagle3.optimizer import learning_rate
from eagle3.progress import ConsoleReporter
from eagle3.splits import open_split
from eagle3.target import read_head
from eagle3.trainer import Trainer

SIZE = 128


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {"folder": tmp_path_factory.mktemp("inputs")}


@pytest.fixture
def inputs(
    made: dict[str, object], tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Inputs:
    """The inputs of training in a copy of their folder, which is the current directory."""
    folder = made["folder"]
    assert isinstance(folder, Path)
    if "inputs" not in made:
        monkeypatch.chdir(folder)
        made["inputs"] = make_inputs(tiny_params, SIZE)
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "project"))
    found = made["inputs"]
    assert isinstance(found, Inputs)
    return found


class StopAt(ConsoleReporter):
    """Ends training at a step, as a signal's handler does: with an exception out of nowhere."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.stop = step

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        super().progress(label, done, total, unit)
        if done == self.stop:
            raise KeyboardInterrupt


def with_train(params: Params, **changes: object) -> Params:
    return params.model_copy(update={"train": params.train.model_copy(update=changes)})


def curve() -> list[Mapping[str, str]]:
    with Drafter.curve_home(SIZE).open() as file:
        return list(csv.DictReader(file))


def test_the_loss_falls_and_every_point_of_the_curve_is_written(
    inputs: Inputs, tiny_params: Params
) -> None:
    record = train(inputs, with_train(tiny_params, total_steps=30, learning_rate=4e-3))
    losses = [float(point["loss"]) for point in curve() if point["loss"]]

    assert len(losses) == 30
    assert losses[-1] < 0.9 * losses[0]
    assert record.draft_vocab == SIZE
    assert record.made_from["vocab"] == inputs.vocab.fingerprint


def test_the_kept_checkpoint_is_the_best_validated_one(inputs: Inputs, tiny_params: Params) -> None:
    # A learning rate that ruins the drafter after it was good for a while.
    params = with_train(tiny_params, total_steps=60, learning_rate=0.3, warmup_steps=59)
    record = train(inputs, params)
    validated = {
        int(point["step"]): float(point["acceptance_length_validation"])
        for point in curve()
        if point["acceptance_length_validation"]
    }

    assert record.acceptance_length_validation == max(validated.values())
    assert validated[record.best_step] == record.acceptance_length_validation
    assert validated[60] < record.acceptance_length_validation


def test_the_newest_drafters_are_kept_beside_the_best_and_older_ones_are_not(
    inputs: Inputs, tiny_params: Params
) -> None:
    # Validated at steps 0, 2, 4, 6, 8.
    train(inputs, with_train(tiny_params, total_steps=8, validate_every=2, keep_checkpoints=2))
    folders = sorted((Drafter.home(SIZE) / "checkpoints").iterdir())
    state = load_file(Drafter.home(SIZE) / "training" / "state.safetensors")
    last, _ = load_drafter(folders[-1])

    assert [folder.name for folder in folders] == ["step-0000006", "step-0000008"]
    trained = state["net.fc.weight"].bfloat16().float()
    assert torch.equal(last.fc.weight, trained)


def test_no_drafter_but_the_best_is_kept_unless_it_is_asked_for(
    inputs: Inputs, tiny_params: Params
) -> None:
    train(inputs, with_train(tiny_params, keep_checkpoints=0))
    kept = {path.name for path in Drafter.home(SIZE).iterdir()}
    assert kept == {"config.json", "model.safetensors", Drafter.manifest, "training"}


def test_training_stopped_by_an_exception_goes_on_to_the_same_end(
    inputs: Inputs, tiny_params: Params
) -> None:
    whole = train(inputs, tiny_params)
    weights, points = (Drafter.home(SIZE) / "model.safetensors").read_bytes(), curve()
    state = load_file(Drafter.home(SIZE) / "training" / "state.safetensors")
    shutil.rmtree(Drafter.home(SIZE))
    with pytest.raises(KeyboardInterrupt):
        train(inputs, tiny_params, StopAt(5))
    resumed = train(inputs, tiny_params)

    assert resumed == whole
    assert (Drafter.home(SIZE) / "model.safetensors").read_bytes() == weights
    assert curve() == points
    again = load_file(Drafter.home(SIZE) / "training" / "state.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


KILLED = """
import os, signal, sys
from eagle3.artifacts import Corpus, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params
from eagle3.progress import ConsoleReporter
from tiny_pipeline import Inputs, train

class KilledAt(ConsoleReporter):
    def progress(self, label, done, total, unit):
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

params = Params.model_validate_json(open("params.json").read())
inputs = Inputs(TargetModel.load(TargetModel.home), Corpus.load(Corpus.home),
                HiddenStates.load(HiddenStates.home), DraftVocab.load(DraftVocab.home(128)))
train(inputs, params, KilledAt())
"""


def test_training_that_was_killed_goes_on_from_its_last_state(
    inputs: Inputs, tiny_params: Params
) -> None:
    whole, points = train(inputs, tiny_params), curve()
    shutil.rmtree(Drafter.home(SIZE))
    Path("params.json").write_text(tiny_params.model_dump_json())
    tests = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    killed = subprocess.run([sys.executable, "-c", KILLED], env=env, check=False)

    assert killed.returncode == -signal.SIGKILL
    assert not Drafter.home(SIZE).exists()
    assert list(Path(".work").glob("train-*/training/state.safetensors"))
    assert train(inputs, tiny_params) == whole
    assert curve() == points


def test_four_accumulated_micro_batches_give_the_update_of_one_batch_of_four(
    inputs: Inputs, tiny_params: Params, tmp_path: Path
) -> None:
    def gradients(parts: list[list[int]]) -> dict[str, torch.Tensor]:
        trainer = Trainer(
            inputs.target,
            inputs.vocab,
            tiny_params.drafter,
            tiny_params.train,
            tmp_path,
            ConsoleReporter(),
        )
        batches = [
            read_batch(trainer.train_rows, trainer.train_store.read_rows, part, trainer.device)
            for part in parts
        ]
        trainer.backward(batches)
        return {name: p.grad for name, p in trainer.net.named_parameters() if p.grad is not None}

    apart, together = gradients([[0], [1], [2], [3]]), gradients([[0, 1, 2, 3]])

    assert apart.keys() == together.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_skipped_step_is_the_step_that_would_have_come(inputs: Inputs) -> None:
    rows, store = open_split("train")
    options = {"batch_tokens": 128, "accumulate": 2, "seed": 0, "device": torch.device("cpu")}
    steps = training_steps(rows, store.read_rows, skip=0, **options)
    first = [next(steps) for _ in range(4)]
    fourth = next(training_steps(rows, store.read_rows, skip=3, **options))

    assert [batch.tokens_N.tolist() for batch in fourth] == [
        batch.tokens_N.tolist() for batch in first[3]
    ]


def test_neither_embedding_nor_the_targets_head_is_in_the_checkpoint(
    inputs: Inputs, tiny_params: Params
) -> None:
    train(inputs, tiny_params)
    names = load_file(Drafter.home(SIZE) / "model.safetensors").keys()
    _, maps = load_drafter(Drafter.home(SIZE))

    assert not [name for name in names if "embed" in name]
    assert len(maps.ids_D) == SIZE


def test_a_loss_that_is_no_number_names_the_rate_to_lower(
    inputs: Inputs, tiny_params: Params
) -> None:
    with pytest.raises(TrainingError, match=r"lower train\.learning_rate"):
        train(inputs, with_train(tiny_params, learning_rate=1e30, total_steps=20))


def test_states_of_another_corpus_are_refused(inputs: Inputs, tiny_params: Params) -> None:
    stale = inputs.states.model_copy(update={"made_from": {"corpus": "0" * 64}})
    with pytest.raises(ArtifactError, match="run `dvc repro extract`"):
        train(Inputs(inputs.target, inputs.corpus, stale, inputs.vocab), tiny_params)


def test_a_frozen_head_stays_the_targets_and_is_written_all_the_same(
    inputs: Inputs, tiny_params: Params
) -> None:
    params = with_train(tiny_params, head="frozen", learning_rate=4e-3)
    record = train(inputs, params)
    kept, maps = load_drafter(Drafter.home(SIZE))
    head_DH = read_head(inputs.target)[maps.ids_D].bfloat16().float()
    state = load_file(Drafter.home(SIZE) / "training" / "state.safetensors")
    table = parameter_table(params, SIZE)

    assert record.best_step > 0
    assert torch.equal(kept.lm_head.weight, head_DH)
    assert check_drafter(Drafter.home(SIZE), TargetModel.home) == ()
    assert not [name for name in state if "lm_head" in name]
    assert record.trainable_parameters == table.trainable
    assert record.trainable_parameters == sum(
        tensor.numel() for name, tensor in state.items() if name.startswith("net.")
    )


# The gradient of tv is small where two distributions hardly meet, as here: it falls slowly.
@pytest.mark.parametrize(("loss", "share"), [("tv", 0.95), ("lk_alpha", 0.9)])
def test_a_loss_aimed_at_acceptance_falls(
    inputs: Inputs, tiny_params: Params, loss: str, share: float
) -> None:
    train(inputs, with_train(tiny_params, loss=loss, total_steps=30, learning_rate=4e-3))
    losses = [float(point["loss"]) for point in curve() if point["loss"]]

    assert losses[-1] < share * losses[0]


def test_every_choice_together_is_resumed_and_sound(inputs: Inputs, tiny_params: Params) -> None:
    drafter = tiny_params.drafter.model_copy(update={"fc_norm": True, "norm_output": True})
    params = with_train(
        tiny_params.model_copy(update={"drafter": drafter}), head="frozen", loss="lk_alpha"
    )
    whole = train(inputs, params)
    points = curve()
    shutil.rmtree(Drafter.home(SIZE))
    with pytest.raises(KeyboardInterrupt):
        train(inputs, params, StopAt(5))

    assert train(inputs, params) == whole
    assert curve() == points
    assert check_drafter(Drafter.home(SIZE), TargetModel.home) == ()


def test_the_learning_rate_warms_up_and_ends_at_its_floor(tiny_params: Params) -> None:
    params = tiny_params.train.model_copy(
        update={"warmup_steps": 4, "total_steps": 10, "min_learning_rate_ratio": 0.1}
    )
    rates = [learning_rate(params, step) / params.learning_rate for step in range(11)]

    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[10] == pytest.approx(0.1)
