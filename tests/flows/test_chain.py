"""The shipped pipeline, whole, on a tiny target: what runs, what does not, and what is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

# MLflow's own queries use what its SQLAlchemy will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

FIRST = [
    *("target", "corpus", "extract", "vocab@full", "train@full", "evaluate@full"),
    *("serve@full", "compare"),
]
SECOND = ["vocab@288", "train@288", "evaluate@288", "serve@288", "compare"]


def mlflow_runs(folder: Path) -> list[Any]:
    """All MLflow runs of a project, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("eagle3").experiment_id
    return client.search_runs([experiment], order_by=["attributes.start_time ASC"])


@pytest.fixture(scope="module")
def recorded(chain, second_size) -> dict[str, Any]:
    """The latest MLflow run of each stage, after both sizes have run."""
    return {run.data.tags["stage"]: run for run in mlflow_runs(chain.folder)}


def test_every_stage_ran_as_a_task_with_its_flow_nested_under_it(chain_run, prefect_api):
    body = {"flow_runs": {"id": {"any_": [chain_run]}}}
    tasks = prefect_api("task_runs/filter", body)
    assert sorted(task["name"] for task in tasks) == sorted(FIRST)
    assert {task["state_name"] for task in tasks} == {"Ran"}

    ids = [task["id"] for task in tasks]
    nested = prefect_api("flow_runs/filter", {"flow_runs": {"parent_task_run_id": {"any_": ids}}})
    assert len(nested) == len(FIRST)
    assert {run["state"]["type"] for run in nested} == {"COMPLETED"}


def test_the_output_of_the_library_is_in_the_logs_of_the_pipeline_and_of_the_stage(
    chain_run, prefect_api
):
    def lines(run: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
        return [line["message"] for line in prefect_api("logs/filter", wanted)]

    names = {"flow_runs": {"name": {"any_": ["train@full"]}}}
    (stage,) = prefect_api("flow_runs/filter", names)
    for run in (chain_run, stage["id"]):
        steps = [line for line in lines(run) if line.startswith("step ") and "loss" in line]
        assert len(steps) > 1, lines(run)


def test_the_decision_and_the_progress_of_long_stages_are_artifacts(chain_run, prefect_api):
    artifacts = prefect_api("artifacts/filter", {})
    kinds = {artifact["key"]: artifact["type"] for artifact in artifacts}
    assert kinds["decision"] == "markdown"
    bars = {key for key, kind in kinds.items() if kind == "progress"}
    for stage in ("corpus", "extract", "train-full", "evaluate-full"):
        assert any(key.startswith(f"progress-{stage}") for key in bars), bars


def test_each_stage_is_an_mlflow_run_under_that_of_the_pipeline(chain, chain_run):
    runs = mlflow_runs(chain.folder)
    (parent,) = [run for run in runs if run.data.tags["stage"] == "pipeline"]
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["prefect.flow_run_id"] == chain_run

    me = parent.info.run_id
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == me]
    order = [run.data.tags["stage"] for run in children]
    # evaluate and serve both follow train, and wait for nothing of each other.
    assert sorted(order) == sorted(FIRST)
    assert (order[:5], order[-1]) == (FIRST[:5], FIRST[-1])
    for run in children:
        assert run.info.status == "FINISHED"
        assert len(run.data.tags["git.commit"]) == 40
        assert len(run.data.tags["prefect.flow_run_id"]) == 36


def test_mlflow_has_the_hashes_that_dvc_lock_has(chain, recorded):
    lock = yaml.safe_load((chain.folder / "dvc.lock").read_text())["stages"]
    for stage, run in recorded.items():
        if stage == "pipeline":
            continue
        for item in lock[stage]["deps"]:
            assert run.data.tags[f"dvc.in.{item['path']}"] == item["md5"]
        for item in lock[stage]["outs"]:
            if not item["path"].startswith(("runs/", "reports/metrics/")):
                assert run.data.tags[f"dvc.out.{item['path']}"] == item["md5"]


def own_metrics(run) -> set[str]:
    # A run of under ten seconds can end before the system was sampled.
    return {name for name in run.data.metrics if not name.startswith("system/")}


def test_runs_of_two_sizes_can_be_read_side_by_side(recorded):
    for stage in ("vocab", "train", "evaluate", "serve"):
        small, full = recorded[f"{stage}@288"], recorded[f"{stage}@full"]
        assert (small.data.params["draft_vocab"], full.data.params["draft_vocab"]) == ("288", "320")
        assert set(small.data.params) == set(full.data.params)
        assert own_metrics(small) == own_metrics(full)


def test_the_evaluate_run_carries_the_params_of_the_whole_chain(chain, recorded):
    params = yaml.safe_load((chain.folder / "params.yaml").read_text())
    names = set(recorded["evaluate@full"].data.params)
    for section, values in params.items():
        assert any(name.startswith(f"{section}.") for name in names)
        plain = {
            f"{section}.{key}"
            for key, value in values.items()
            if not isinstance(value, (dict, list))
        }
        assert plain <= names


def test_training_has_curves_in_mlflow(chain, recorded):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{chain.folder / 'mlflow.db'}")
    curve = client.get_metric_history(recorded["train@full"].info.run_id, "loss")
    assert len({point.step for point in curve}) > 1


def test_metrics_files_are_the_figures_of_the_mlflow_runs(chain, recorded):
    for stage in {*FIRST, *SECOND}:
        figures = json.loads((chain.folder / f"reports/metrics/{stage}.json").read_text())
        logged = recorded[stage].data.metrics
        assert figures == pytest.approx({name: logged[name] for name in figures})
        made_by = json.loads((chain.folder / f"runs/{stage}.json").read_text())
        assert made_by == {"mlflow_run_id": recorded[stage].info.run_id}
    evaluated = json.loads((chain.folder / "reports/metrics/evaluate@288.json").read_text())
    assert {"acceptance_length_k3", "acceptance_length_loop_k3", "draft_step_us"} <= set(evaluated)


def test_a_second_repro_does_nothing(chain, chain_run):
    assert chain.repro() == []


def test_dvc_shows_the_metrics_and_the_plots(chain, second_size):
    shown = json.loads(chain.run("dvc", "metrics", "show", "--json").stdout)
    assert not any("error" in entry for entry in shown[""].values())
    plots = json.loads(chain.run("dvc", "plots", "show", "--json").stdout)
    assert "errors" not in plots
    assert set(plots["data"]) == {
        "reports/acceptance.csv",
        *(
            f"reports/{what}/{size}.csv"
            for what in ("coverage", "training")
            for size in (288, "full")
        ),
    }


def test_another_size_runs_that_size_and_compare_only(second_size):
    assert sorted(second_size) == sorted(SECOND)


def test_another_learning_rate_reruns_what_follows_training_only(chain, chain_run):
    chain.change("vocab", sizes=["full"])
    chain.change("train", learning_rate=5.0e-3)
    assert "train.learning_rate" in chain.run("dvc", "params", "diff").stdout
    assert sorted(chain.repro()) == ["compare", "evaluate@full", "serve@full", "train@full"]


def test_other_serving_params_rerun_serving_alone_while_nothing_is_served(chain, chain_run):
    chain.change("vocab", sizes=["full"])
    chain.change("train", learning_rate=5.0e-3)
    chain.repro()
    chain.change("serve", prompts=2)
    # Its record says the same as before: compare has nothing to do.
    assert chain.repro() == ["serve@full"]


def test_going_back_restores_results_and_runs_nothing(chain, second_size):
    chain.change("vocab", sizes=[288, "full"])
    chain.change("train", learning_rate=2.0e-3)
    chain.change("serve", prompts=3)
    assert chain.repro() == []
