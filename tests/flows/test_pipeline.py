"""The pipeline flow over real DVC and a real Prefect server."""

import sqlite3
from pathlib import Path

STAGES = ["first", "second@1", "second@full", "last"]


def pipeline_runs(project: Path) -> list[tuple[str, str]]:
    """(run id, status) of the MLflow runs of whole pipelines, read from MLflow's own file."""
    query = (
        "select runs.run_uuid, runs.status from runs join tags on runs.run_uuid = tags.run_uuid "
        "where tags.key = 'stage' and tags.value = 'pipeline' order by runs.start_time"
    )
    with sqlite3.connect(project / "mlflow.db") as database:
        found = database.execute(query).fetchall()
    database.close()
    return found


def test_each_stage_of_dvc_yaml_is_a_task_in_an_order_that_works(deployment, first_run):
    assert deployment.task_states(first_run) == [(stage, "Ran") for stage in STAGES]


def test_the_stages_table_is_an_artifact_of_the_run(deployment, first_run):
    wanted = {"artifacts": {"flow_run_id": {"any_": [first_run]}}}
    artifacts = deployment.call("artifacts/filter", wanted)
    assert [artifact["key"] for artifact in artifacts] == ["stages"]
    assert all(stage in artifacts[0]["data"] for stage in STAGES)


def test_the_output_of_stages_is_in_the_log_of_the_run(deployment, first_run):
    messages = deployment.log_until(first_run, "Finished in state Completed()")
    assert "> python second.py full" in messages
    assert not any("git add" in message for message in messages)


def test_retry_reruns_the_failed_stage_and_no_finished_one(deployment, first_run):
    earlier = len(pipeline_runs(deployment.project))
    deployment.set_rate(-1)
    run = deployment.start()
    state = deployment.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    assert state["type"] == "FAILED"
    assert "second@1" in state["message"]
    assert "rate is -1; give a positive one" in state["message"]
    assert deployment.task_states(run) == [("first", "Unchanged"), ("second@1", "Failed")]
    assert [status for _, status in pipeline_runs(deployment.project)[earlier:]] == ["FAILED"]

    deployment.set_rate(2)
    deployment.retry(run)
    state = deployment.wait_for(run, "COMPLETED", "CRASHED")
    assert state["type"] == "COMPLETED"
    after_retry = deployment.task_states(run)[2:]
    assert after_retry == [("first", "Unchanged")] + [(stage, "Ran") for stage in STAGES[1:]]
    # The retry goes on in the MLflow run of the first attempt.
    assert [status for _, status in pipeline_runs(deployment.project)[earlier:]] == ["FINISHED"]


def test_going_back_to_old_params_restores_the_old_results(deployment, first_run):
    deployment.set_rate(1)  # the test before left another rate
    run = deployment.start()
    deployment.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    assert deployment.task_states(run) == [("first", "Unchanged")] + [
        (stage, "Restored") for stage in STAGES[1:]
    ]


def test_runs_that_lose_their_process_are_crashed_by_an_automation(deployment):
    automations = deployment.call("automations/filter", {})
    assert [automation["name"] for automation in automations] == [
        "eagle3: crash runs without heartbeat"
    ]
