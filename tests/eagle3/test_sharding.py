"""Training in two processes that share float32 weights and moments (FSDP2 over gloo), as one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from teams import (
    SIZE,
    STEP,
    UNEVEN,
    Runs,
    StopAt,
    assert_curve_is_that_of_one,
    assert_gradients_are_those_of_one,
    assert_one_process_goes_on_from,
    start_two,
    with_train,
)
from tiny_pipeline import train

from eagle3.artifacts import Drafter

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


def run_two(runs: Runs) -> None:
    """From a state that one process leaves."""
    with pytest.raises(KeyboardInterrupt):
        train(runs.inputs, runs.params, StopAt(2))
    start_two(runs.two, PROCESS, with_train(runs.params, processes=2, sharding="full"))


@pytest.mark.parametrize("hot", [False, True], ids=["plain", "hot"])
@pytest.mark.parametrize(("name", "step"), [("even", STEP), ("uneven", UNEVEN)])
def test_gradients_in_parts_are_those_of_one_process_with_the_same_step(
    runs: Runs, name: str, step: tuple[tuple[int, ...], ...], hot: bool
) -> None:
    first = assert_gradients_are_those_of_one(runs, name, step, hot)
    second = load_file(f"{name}-{hot}-1.safetensors")
    assert first["share"] == second["share"] == 0.5


def test_a_run_of_one_process_goes_on_in_parts_with_the_same_curve_and_state(runs: Runs) -> None:
    assert Path("steps.txt").read_text().split() == ["3", "4", "5", "6"]
    assert_curve_is_that_of_one(runs, Path("resumed.csv"))
    weights, expected = (
        load_file(folder / "training" / "state.safetensors")
        for folder in (Path("resumed"), runs.one / Drafter.home(SIZE))
    )

    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_signal_to_one_process_stops_all_with_a_state_that_one_process_goes_on_from(
    runs: Runs,
) -> None:
    assert_one_process_goes_on_from(runs, step=4)
