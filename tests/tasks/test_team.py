"""The train stage in two processes: who starts, who writes, and how they end."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from teams import with_train
from tiny_pipeline import Inputs, make_inputs, train

from eagle3.config import Params
from eagle3.errors import ParamsError
from tasks import tracking
from tasks.team import training_team

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

SIZE = 128
TRAIN = [sys.executable, "-m", "flows.train", str(SIZE)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves what training reads, for the second."""
    return tmp_path_factory.mktemp("made") / "data"


@pytest.fixture
def two(tiny_params: Params, project: Path, made: Path) -> Params:
    """params.yaml of a run of two processes, and everything that it reads."""
    changes = {"processes": 2, "accumulate": 2, "log_every": 1, "validate_every": 2}
    params = with_train(tiny_params, batch_tokens=128, **changes)
    if not made.exists():
        make_inputs(params, SIZE)
        shutil.copytree("data", made)
    else:
        shutil.copytree(made, "data")
    write(params)
    return params


def write(params: Params) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(params.model_dump(mode="json")))


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}


def statuses() -> list[str]:
    client, experiment = tracking.client()
    return [run.info.status for run in client.search_runs([experiment])]


@contextmanager
def at_step_3() -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """A run that has taken three steps and has many to come, and its helper."""
    leader = subprocess.Popen(TRAIN, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert leader.stderr is not None
        said = []
        for line in leader.stderr:
            said.append(line)
            if line.startswith("step 3:"):
                break
        helpers = psutil.Process(leader.pid).children()
        assert len(helpers) == 1, "".join(said)
        yield leader, helpers[0]
    finally:
        leader.kill()
        leader.wait()


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_terminated_run_leaves_a_state_that_one_process_goes_on_from(
    two: Params, sharding: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(with_train(two, total_steps=40, sharding=sharding))
    with at_step_3() as (leader, helper):
        leader.send_signal(signal.SIGTERM)
        _, errors = leader.communicate(timeout=60)
        helper.wait(timeout=10)

    assert leader.returncode == 143
    assert errors.splitlines()[-1].startswith("error: terminated; finished work is kept")
    assert list(Path(".work").glob("train-*/training/state.safetensors"))
    assert statuses() == ["KILLED"]
    inputs = Inputs.load(SIZE)
    with caplog.at_level("INFO", "eagle3"):
        record = train(inputs, with_train(two, processes=1, total_steps=40))
    assert "going on from step" in caplog.text
    assert record.draft_vocab == SIZE


def test_a_lost_process_is_named_and_the_state_is_kept(two: Params) -> None:
    write(with_train(two, total_steps=1000))
    with at_step_3() as (leader, helper):
        helper.kill()
        _, errors = leader.communicate(timeout=60)

    assert leader.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: training process 1 of 2 ended with exit code -9")
    assert "Run the same command to go on" in last
    assert list(Path(".work").glob("train-*/training/state.safetensors"))
    assert statuses() == ["FAILED"]


def test_another_number_of_processes_than_torchrun_started_names_the_key_to_set(
    tiny_params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ParamsError, match=r"set it to 2, or run `python -m flows\.train full`"),
        training_team(tiny_params.train, "full"),
    ):
        pass
