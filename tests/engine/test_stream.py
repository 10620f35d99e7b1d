"""Training while vLLM makes the states that it reads."""

import csv
import shutil
from pathlib import Path

import pytest
from tiny_pipeline import Inputs, train

from eagle3.artifacts import Drafter, HiddenStates
from eagle3.engines.vllm import VllmEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter

SIZE = 128


def losses() -> list[float]:
    with Drafter.curve_home(SIZE).open() as file:
        return [float(point["loss"]) for point in csv.DictReader(file) if point["loss"]]


def test_the_loss_is_that_of_stored_states_of_the_same_engine(
    project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(shutil.copytree(Path.cwd(), tmp_path / "project"))
    inputs = Inputs.load(SIZE)
    params = project.params
    found = []
    for keep in (True, False):
        extract = params.extract.model_copy(update={"keep": keep, "backend": "vllm"})
        chosen = params.model_copy(update={"extract": extract})
        with VllmEngine(inputs.target, params.target, 256, Path("logs/stream.log")) as engine:
            states = extract_hidden_states(
                inputs.target, inputs.corpus, extract, engine, HiddenStates.home, ConsoleReporter()
            )
            made = Inputs(inputs.target, inputs.corpus, states, inputs.vocab)
            train(made, chosen, engine=None if keep else engine)
        found.append(losses())

    assert not (HiddenStates.home / "train.zarr").exists()
    assert found[1] == pytest.approx(found[0], rel=1e-3)
