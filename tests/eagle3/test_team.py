"""Training in two processes of torchrun (gloo): the gradients, curves and states of one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from teams import (
    SIZE,
    STEP,
    UNEVEN,
    Runs,
    assert_curve_is_that_of_one,
    assert_gradients_are_those_of_one,
    assert_one_process_goes_on_from,
    start_two,
    with_train,
)

from eagle3.artifacts import Drafter
from eagle3.batches import training_steps
from eagle3.splits import open_split
from eagle3.team import Team

# What each process runs: gradients, a whole run, and one that is stopped after step 3.
PROCESS = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from eagle3.config import Params
from eagle3.errors import TrainingError
from eagle3.team import joined
from teams import STEP, UNEVEN, StopAt, gradients
from tiny_pipeline import Inputs, train

params = Params.model_validate_json(Path("params.json").read_text())
inputs = Inputs.load(128)
with joined(torch.device("cpu"), os.environ) as team:
    for name, step in (("even", STEP), ("uneven", UNEVEN)):
        for hot in (False, True):
            found = gradients(inputs, params, team.share(step), team, hot)
            save_file(found, f"{name}-{hot}-{team.rank}.safetensors")
    train(inputs, params, team=team)
    team.meet()
    if team.leads:
        Path(f"models/{inputs.vocab.size}").rename("whole")
        Path("reports/training/128.csv").rename("whole.csv")
    try:
        team.require_same_step(team.rank)
    except TrainingError as error:
        Path(f"refused-{team.rank}.txt").write_text(str(error))
    try:
        train(inputs, params, StopAt(3), team)
    except KeyboardInterrupt:
        sys.exit()
"""


def run_two(runs: Runs) -> None:
    start_two(runs.two, PROCESS, with_train(runs.params, processes=2))


@pytest.mark.parametrize("hot", [False, True], ids=["plain", "hot"])
@pytest.mark.parametrize(("name", "step"), [("even", STEP), ("uneven", UNEVEN)])
def test_gradients_of_two_processes_are_those_of_one_with_the_same_step(
    runs: Runs, name: str, step: tuple[tuple[int, ...], ...], hot: bool
) -> None:
    assert_gradients_are_those_of_one(runs, name, step, hot)


def test_two_processes_give_the_curve_and_the_drafter_of_one(runs: Runs) -> None:
    assert_curve_is_that_of_one(runs, Path("whole.csv"))
    weights, expected = (
        load_file(folder / "model.safetensors")
        for folder in (Path("whole"), runs.one / Drafter.home(SIZE))
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0.01, atol=1e-3)


def test_a_run_of_two_processes_that_was_stopped_goes_on_with_one(runs: Runs) -> None:
    assert_one_process_goes_on_from(runs, step=3)


def test_the_shares_of_a_step_are_its_micro_batches(runs: Runs) -> None:
    rows, store = open_split("train")

    def step(team: Team) -> list[list[int]]:
        options = {"batch_tokens": 128, "accumulate": 4, "seed": 0, "skip": 1, "team": team}
        steps = training_steps(rows, store.read_rows, device=torch.device("cpu"), **options)
        return [batch.tokens_N.tolist() for batch in next(steps)]

    first, second = step(Team(0, 2, 0)), step(Team(1, 2, 1))

    assert len(first) == len(second) == 2
    whole = step(Team(0, 1, 0))
    assert sorted([*first, *second]) == sorted(whole)


def test_processes_that_found_different_training_states_are_refused(runs: Runs) -> None:
    refused = {Path(f"refused-{rank}.txt").read_text() for rank in range(2)}
    assert refused == {
        "the processes would go on from different steps ([0, 1] by rank); run them in one "
        "project folder, which all machines share"
    }
