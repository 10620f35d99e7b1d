"""The deployment `eagle3-pipeline/local`: what Prefect's Run and Retry buttons reach.

Runs until it is stopped. PREFECT_API_URL says at which server; `make prefect` starts one.
"""

from datetime import timedelta

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.pipeline import pipeline
from tasks.signals import die_with_parent

AUTOMATION = "eagle3: crash runs without heartbeat"
ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def ensure_automation() -> None:
    """Have the server mark a run crashed when its process and the runner died together.

    Such a run would stay "Running" for ever, and have no Retry button.
    """
    with get_client(sync_client=True) as client:
        if client.read_automations_by_name(AUTOMATION):
            return
    heartbeat = "prefect.flow-run.heartbeat"
    trigger = EventTrigger(
        after={heartbeat},
        expect={heartbeat, *(f"prefect.flow-run.{end}" for end in ENDS)},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=90),
    )
    message = "No heartbeat for 90 s: the process is gone. Retry goes on from finished work."
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    Automation(name=AUTOMATION, trigger=trigger, actions=[action]).create()


if __name__ == "__main__":
    die_with_parent()
    ensure_automation()
    # Not paused on shutdown: a retry that was asked for meanwhile starts when this runs again.
    pipeline.serve(name="local", limit=1, pause_on_shutdown=False, print_starting_message=False)
