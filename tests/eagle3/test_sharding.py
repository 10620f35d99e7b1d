"""Training in two processes that share float32 weights and moments (FSDP2 over gloo), as one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from teams import STEP, UNEVEN, Runs, StopAt, curve, gradients, start_two
from tiny_pipeline import make_inputs, train

from eagle3.artifacts import Drafter
from eagle3.config import Params
from eagle3.team import ALONE

SIZE = 128

# What each process runs: gradients, a run that goes on from one process's state, and one that a
# signal to the first process stops after step 4.
PROCESS = """
import os, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from eagle3.config import Params
from eagle3.team import joined
from eagle3.progress import ConsoleReporter
from teams import STEP, UNEVEN, gradients
from tiny_pipeline import Inputs, train

class Noting(ConsoleReporter):
    def progress(self, label, done, total, unit):
        if team.leads and label == "training":
            with Path("steps.txt").open("a") as file:
                file.write(f"{done}\\n")

class Interrupted(ConsoleReporter):
    def progress(self, label, done, total, unit):
        if done == 3 and team.leads:
            os.kill(os.getpid(), signal.SIGINT)

params = Params.model_validate_json(Path("params.json").read_text())
inputs = Inputs.load(128)
with joined(torch.device("cpu"), os.environ) as team:
    for name, step in (("even", STEP), ("uneven", UNEVEN)):
        for hot in (False, True):
            found = gradients(inputs, params, team.share(step), team, hot)
            parts = {n: t for n, t in found.items() if isinstance(t, DTensor)}
            assert len(parts) == len(found) - 1
            held = sum(t.to_local().numel() for t in parts.values())
            whole = {n: t.full_tensor() if n in parts else t for n, t in found.items()}
            whole["share"] = torch.tensor(held / sum(t.numel() for t in parts.values()))
            save_file(whole, f"{name}-{hot}-{team.rank}.safetensors")
    train(inputs, params, Noting(), team)
    team.meet()
    if team.leads:
        Path(f"models/{inputs.vocab.size}").rename("resumed")
        Path("reports/training/128.csv").rename("resumed.csv")
    team.meet()
    try:
        train(inputs, params, Interrupted(), team)
    except KeyboardInterrupt:
        sys.exit()
"""


def with_train(params: Params, **changes: object) -> Params:
    return params.model_copy(update={"train": params.train.model_copy(update=changes)})


@pytest.fixture(scope="module")
def done() -> dict[str, Runs]:
    return {}


@pytest.fixture
def runs(
    done: dict[str, Runs],
    tiny_params: Params,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """Both runs, made once; the current folder is that of the two processes."""
    if "runs" not in done:
        one = tmp_path_factory.mktemp("one")
        params = with_train(tiny_params, accumulate=2, batch_tokens=128)
        monkeypatch.chdir(one)
        inputs = make_inputs(params, SIZE)
        two = shutil.copytree(one, one.with_name("two-sharded"))
        train(inputs, params)
        monkeypatch.chdir(two)
        with pytest.raises(KeyboardInterrupt):
            train(inputs, params, StopAt(2))
        start_two(two, PROCESS, with_train(params, processes=2, sharding="full"))
        done["runs"] = Runs(inputs, params, two, one)
    monkeypatch.chdir(done["runs"].two)
    return done["runs"]


@pytest.mark.parametrize("hot", [False, True], ids=["plain", "hot"])
@pytest.mark.parametrize(("name", "step"), [("even", STEP), ("uneven", UNEVEN)])
def test_gradients_in_parts_are_those_of_one_process_with_the_same_step(
    runs: Runs, name: str, step: tuple[tuple[int, ...], ...], hot: bool
) -> None:
    alone = gradients(runs.inputs, runs.params, step, ALONE, hot)
    first, second = (load_file(f"{name}-{hot}-{rank}.safetensors") for rank in range(2))

    assert first["share"] == second["share"] == 0.5
    for key, expected in alone.items():
        assert torch.equal(first[key], second[key])
        worst = (first[key] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert worst < 1e-6, key


def test_a_run_of_one_process_goes_on_in_parts_with_the_same_curve_and_state(runs: Runs) -> None:
    assert Path("steps.txt").read_text().split() == ["3", "4", "5", "6"]
    two, one = curve(Path("resumed.csv")), curve(runs.one / Drafter.curve_home(SIZE))
    weights, expected = (
        load_file(folder / "training" / "state.safetensors")
        for folder in (Path("resumed"), runs.one / Drafter.home(SIZE))
    )

    assert two["acceptance_length_validation"] == one["acceptance_length_validation"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_signal_to_one_process_stops_all_with_a_state_that_one_process_goes_on_from(
    runs: Runs,
) -> None:
    (state,) = Path(".work").glob("train-*/training/state.safetensors")
    assert int(load_file(state)["optimizer.step.norm.weight"]) == 4
    train(runs.inputs, runs.params)
    resumed, straight = curve(Drafter.curve_home(SIZE)), curve(runs.one / Drafter.curve_home(SIZE))

    assert resumed["loss"] == pytest.approx(straight["loss"], rel=1e-6)
    assert resumed["acceptance_length_validation"] == straight["acceptance_length_validation"]
