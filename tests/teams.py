"""Processes of torchrun that train together, for tests that hold them against one."""

import csv
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.artifacts import Drafter
from eagle3.batches import read_batch
from eagle3.config import Params
from eagle3.progress import ConsoleReporter
from eagle3.team import ALONE, Team
from eagle3.trainer import Trainer

SIZE = 128

STEP = ((0, 1), (2,), (3,), (4, 5))
"""Rows of the micro-batches of one step."""
UNEVEN = ((0,), ())
"""A step whose second process finds nothing to predict."""


@dataclass(frozen=True)
class Runs:
    """A project folder after both: two processes, and one."""

    inputs: Inputs
    params: Params
    two: Path
    one: Path


class StopAt(ConsoleReporter):
    """Ends training at a step, as a signal's handler does."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.stop = step

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        if done == self.stop:
            raise KeyboardInterrupt


def gradients(
    inputs: Inputs, params: Params, step: tuple[tuple[int, ...], ...], team: Team, hot: bool
) -> dict[str, torch.Tensor]:
    """What `Trainer.backward` leaves for micro-batches of these rows; of none, for a masked row."""
    trainer = Trainer(
        inputs.target, inputs.vocab, params.drafter, params.train, Path(), ConsoleReporter(), team
    )
    if hot:
        trainer.use_hot_path()
    batches = []
    for part in step:
        batch = read_batch(
            trainer.train_rows, trainer.train_store.read_rows, part or (1,), trainer.device
        )
        batch.loss_mask_N[:] &= bool(part)
        batches.append(batch)
    loss, accuracy = trainer.backward(batches)
    found = {name: p.grad for name, p in trainer.net.named_parameters() if p.grad is not None}
    return found | {"loss": torch.tensor([loss, *accuracy], dtype=torch.float64)}


def with_train(params: Params, **changes: object) -> Params:
    """Params with other values in `train`."""
    return params.model_copy(update={"train": params.train.model_copy(update=changes)})


def in_one_process(params: Params, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Train in one process in a folder, beside a copy of it that has the inputs alone."""
    monkeypatch.chdir(folder)
    inputs = make_inputs(params, SIZE)
    two = shutil.copytree(folder, folder.with_name(f"{folder.name}-two"))
    train(inputs, params)
    return Runs(inputs, params, two, folder)


def assert_gradients_are_those_of_one(
    runs: Runs, name: str, step: tuple[tuple[int, ...], ...], hot: bool
) -> dict[str, torch.Tensor]:
    """Compare what both processes saved under a name; returns the first one's."""
    alone = gradients(runs.inputs, runs.params, step, ALONE, hot)
    first, second = (load_file(f"{name}-{hot}-{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys() >= alone.keys()
    for key, expected in alone.items():
        assert torch.equal(first[key], second[key])
        worst = (first[key] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert worst < 1e-6, key
    return first


def assert_curve_is_that_of_one(runs: Runs, path: Path) -> None:
    """Compare a curve with that of one process."""
    found, one = curve(path), curve(runs.one / Drafter.curve_home(SIZE))
    assert found["acceptance_length_validation"] == one["acceptance_length_validation"]
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def assert_one_process_goes_on_from(runs: Runs, step: int) -> None:
    """Finish, in one process, what two left at a step."""
    (state,) = Path(".work").glob("train-*/training/state.safetensors")
    assert int(load_file(state)["optimizer.step.norm.weight"]) == step
    train(runs.inputs, runs.params)
    assert_curve_is_that_of_one(runs, Drafter.curve_home(SIZE))


def curve(path: Path) -> dict[str, list[float]]:
    """A run's loss, gradient norm and validated acceptance length, point by point."""
    with path.open() as file:
        points = list(csv.DictReader(file))
    return {
        name: [float(point[name]) for point in points if point[name]]
        for name in ("loss", "grad_norm", "acceptance_length_validation")
    }


def start_two(folder: Path, program: str, params: Params) -> None:
    """Run a program in two processes there; it finds the params in params.json."""
    (folder / "params.json").write_text(params.model_dump_json())
    (folder / "process.py").write_text(program)
    tests = Path(__file__).parent
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent))),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "process.py"], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
