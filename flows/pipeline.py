"""The product on one screen: every stage of dvc.yaml, in order, as one Prefect flow.

Each stage is a task that asks DVC. Retry calls the flow from the top; what is finished is unchanged
and costs under a second.
"""

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.states import State

from tasks import dvc_stage, tracking
from tasks.errors import StageFailed
from tasks.prefect_lazy import quieten_known_errors


@flow(name="eagle3-pipeline")
def pipeline(force: bool = False) -> None:
    """Bring every stage of dvc.yaml up to date.

    Args:
        force: run all stages, changed or not.
    """
    quieten_known_errors()
    reproduce = dvc_stage.as_prefect_task()
    states: dict[str, State] = {}
    with tracking.pipeline_run(str(flow_run.id)) as parent:
        for stage in dvc_stage.stages():
            needs = [states[name] for name in stage.needs]
            state = reproduce(stage.name, parent.id, force, wait_for=needs, return_state=True)
            states[stage.name] = state
            if not state.is_completed():
                break
            tracking.link_reused(parent, stage.name, state.name)
        create_table_artifact(
            key="stages",
            table=[{"stage": name, "state": state.name} for name, state in states.items()],
        )
        failed = [state for state in states.values() if not state.is_completed()]
        if failed:
            reason = failed[0].result(raise_on_failure=False)
            raise StageFailed(f"{reason}; mend it, then Retry: finished stages are not run again")


if __name__ == "__main__":
    pipeline()
