"""The process of a stage: its exit code, its one plain line, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tasks import tracking

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


@pytest.fixture
def tiny_project(project, tiny_params) -> Path:
    write_params(tiny_params.model_dump(mode="json"))
    return project


def write_params(tree) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(tree))


def change(section: str, **values) -> None:
    tree = yaml.safe_load(Path("params.yaml").read_text())
    tree[section] |= values
    write_params(tree)


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


def runs():
    client, experiment = tracking.client()
    return client.search_runs([experiment])


def test_a_stage_leaves_its_result_its_metrics_and_the_name_of_its_mlflow_run(tiny_project):
    done = run("flows.target")

    assert done.returncode == 0, done.stderr
    assert "target: no PREFECT_API_URL, so this stage runs without Prefect" in done.stderr
    assert Path("data/target/manifest.json").exists()
    (recorded,) = runs()
    assert json.loads(Path("runs/target.json").read_text()) == {
        "mlflow_run_id": recorded.info.run_id
    }
    assert json.loads(Path("reports/metrics/target.json").read_text()) == recorded.data.metrics
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params["target.shape.num_layers"] == "8"


def test_all_bad_keys_of_params_are_named_at_once_before_anything_runs(tiny_project):
    change("train", learning_rate=-1, lerning_rate=1)
    change("vocab", sizes=[64, 100_000])
    done = run("flows.target")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "train.learning_rate" in done.stderr
    assert "train.lerning_rate: unknown key" in done.stderr
    assert runs() == []


def test_a_stage_of_one_size_wants_one_size(tiny_project):
    done = run("flows.vocab")
    assert done.returncode == 2
    assert "usage: python -m flows.vocab SIZE" in done.stderr


def test_a_size_that_is_none_is_refused(tiny_project):
    done = run("flows.vocab", "32k")
    assert done.returncode == 2
    assert "'32k' is not a size" in done.stderr


def test_what_a_user_can_mend_ends_in_one_line_and_a_failed_run(tiny_project):
    change("target", source=str(tiny_project / "nowhere"))
    done = run("flows.target")

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nowhere" in done.stderr
    assert [recorded.info.status for recorded in runs()] == ["FAILED"]


def test_a_missing_input_names_the_stage_to_run(tiny_project):
    done = run("flows.corpus")
    assert done.returncode == 1
    assert "run `dvc repro target`" in done.stderr


def test_a_prefect_server_that_is_not_there_is_named(tiny_project):
    environ = environment() | {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(tiny_project / ".prefect"),
        "PREFECT_CLIENT_MAX_RETRIES": "0",
    }
    command = [sys.executable, "-m", "flows.target"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "unset PREFECT_API_URL" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_stopped_stage_marks_its_mlflow_run_killed(tiny_project, number, code):
    script = (
        "import time\n"
        "from tasks.stage import run_stage\n"
        "def wait(params):\n"
        "    print('running', flush=True)\n"
        "    time.sleep(60)\n"
        "run_stage('target', wait)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate()

    assert process.returncode == code
    assert "finished work is kept" in errors
    assert "Traceback" not in errors
    assert [recorded.info.status for recorded in runs()] == ["KILLED"]


def test_a_full_disk_is_a_plain_error(tiny_project):
    script = (
        "import errno, os\n"
        "from tasks.stage import run_stage\n"
        "def write(params):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "run_stage('target', write)\n"
    )
    done = run_script(script)
    assert done.returncode == 1
    assert "no room for the results of target" in done.stderr
    assert "Traceback" not in done.stderr
    assert [recorded.info.status for recorded in runs()] == ["FAILED"]


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment())
