"""How the target stage runs: retried, since a download can fail by itself."""

from pathlib import Path

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.target import bring_target
from tasks.prefect_lazy import task


@task(name="bring-target", retries=2)
def target(params: TargetParams, out: Path) -> TargetModel:
    """Bring the target model into `out`."""
    return bring_target(params, out)
