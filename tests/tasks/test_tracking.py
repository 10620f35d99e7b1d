"""MLflow runs that say what happened, also when it went wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import tracking
from tasks.errors import ServerError, Terminated

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def the_run(run_id: str):
    client, _ = tracking.client()
    return client.get_run(run_id)


def test_a_run_has_params_metrics_and_where_it_came_from(project):
    with tracking.stage_run("train@full", {"draft_vocab": "320"}, watch_system=False) as run:
        run.log_params({"train": {"learning_rate": 0.001, "dtype": "float32"}, "draft_vocab": 320})
        run.log_metrics({"loss": 2.0}, step=1)
        run.log_metrics({"loss": 1.5}, step=2)

    found = the_run(run.id)
    assert found.info.status == "FINISHED"
    assert found.data.params == {
        "train.learning_rate": "0.001",
        "train.dtype": "float32",
        "draft_vocab": "320",
    }
    assert found.data.metrics == {"loss": 1.5}
    assert found.data.tags["stage"] == "train@full"
    assert found.data.tags["git.commit"] == "none"
    assert found.data.tags["process.pid"] == str(os.getpid())


def test_final_figures_outrank_the_points_of_their_curve(project):
    with tracking.stage_run("train@full", {}, watch_system=False) as run:
        run.log_metrics({"acceptance_length_validation": 1.2}, step=100)
        run.log_figures({"acceptance_length_validation": 1.4})

    assert the_run(run.id).data.metrics == {"acceptance_length_validation": 1.4}


@pytest.mark.parametrize(
    ("ended_by", "status"),
    [(ValueError, "FAILED"), (Terminated, "KILLED"), (KeyboardInterrupt, "KILLED")],
)
def test_a_run_says_how_it_ended(project, ended_by, status):
    runs = []

    def stage() -> None:
        with tracking.stage_run("train@full", {}, watch_system=False) as run:
            runs.append(run)
            run.log_metrics({"loss": 1.0}, step=1)
            raise ended_by("as the test wants")

    with pytest.raises(ended_by, match="as the test wants"):
        stage()

    (run,) = runs
    assert the_run(run.id).info.status == status
    assert the_run(run.id).data.metrics == {"loss": 1.0}


def test_a_run_of_a_killed_process_is_closed_at_the_next_start(project):
    code = (
        "import os, signal\n"
        "from tasks import tracking\n"
        "with tracking.stage_run('train@full', {}, watch_system=False) as run:\n"
        "    print(run.id, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    dead = done.stdout.strip()
    assert the_run(dead).info.status == "RUNNING"

    with tracking.stage_run("train@full", {}, watch_system=False) as alive:
        assert the_run(dead).info.status == "KILLED"
        assert tracking.close_stale_runs() == []
        assert the_run(alive.id).info.status == "RUNNING"


def test_a_run_of_another_machine_is_left_alone(project):
    with tracking.stage_run("train@full", {}, watch_system=False) as run:
        run.tag({"process.host": "elsewhere", "process.pid": "1"})
        assert tracking.close_stale_runs() == []


def test_a_retried_pipeline_goes_on_in_its_own_run(project):
    with (
        pytest.raises(ValueError, match="a stage failed"),
        tracking.pipeline_run("flow-run-1") as first,
    ):
        raise ValueError("a stage failed")
    assert the_run(first.id).info.status == "FAILED"

    with tracking.pipeline_run("flow-run-1") as retried:
        assert the_run(retried.id).info.status == "RUNNING"
    with tracking.pipeline_run("flow-run-2") as other:
        pass

    assert retried.id == first.id
    assert other.id != first.id
    assert the_run(first.id).info.status == "FINISHED"


def test_a_stage_of_a_pipeline_is_a_child_of_its_run(project, monkeypatch):
    with tracking.pipeline_run("flow-run-1") as parent:
        monkeypatch.setenv(tracking.PARENT_RUN, parent.id)
        with tracking.stage_run("target", {}, watch_system=False) as child:
            pass

    assert the_run(child.id).data.tags["mlflow.parentRunId"] == parent.id


def test_a_reused_result_points_to_the_run_that_made_it(project):
    Path("runs").mkdir()
    Path("runs/train@full.json").write_text('{"mlflow_run_id": "abc"}')
    with tracking.pipeline_run("flow-run-1") as parent:
        tracking.link_reused(parent, "train@full", "Restored")
        tracking.link_reused(parent, "target", "Ran")

    reused = {k: v for k, v in the_run(parent.id).data.tags.items() if k.startswith("reused")}
    assert reused == {"reused.train.full": "abc"}


def test_processes_that_start_together_do_not_break_a_new_database(project):
    Path("mlflow.db").unlink()
    code = "from tasks import tracking; tracking.client()"
    command = [sys.executable, "-c", code]
    together = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in together] == [0, 0]


def test_a_dead_tracking_server_is_named_and_does_not_hang(project, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ServerError, match="mend MLFLOW_TRACKING_URI"):
        tracking.client()


def test_an_uncommitted_change_is_recorded_but_not_that_of_dvc_lock(project):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    Path(".gitignore").write_text("mlflow.db*\n")
    subprocess.run([*git, "add", ".gitignore"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    assert tracking.git_tags()["git.dirty"] == "false"

    Path("dvc.lock").write_text("schema: '2.0'\n")
    assert tracking.git_tags()["git.dirty"] == "false"

    Path("new.py").write_text("")
    assert tracking.git_tags()["git.dirty"] == "true"
    assert len(tracking.git_tags()["git.commit"]) == 40


def test_params_are_flattened_to_dotted_names():
    tree = {"a": {"b": 1, "c": (2, 3)}, "sources": [{"kind": "jsonl"}, {"kind": "packaged"}]}
    assert tracking.flatten(tree) == {
        "a.b": 1,
        "a.c": [2, 3],
        "sources.0.kind": "jsonl",
        "sources.1.kind": "packaged",
    }
