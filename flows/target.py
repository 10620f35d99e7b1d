"""The target stage: bring the model that is to be sped up."""

from eagle3.artifacts import TargetModel
from eagle3.config import Params
from tasks.prefect_lazy import flow
from tasks.stage import run_stage
from tasks.target import target


@flow(name="target")
def target_flow(params: Params) -> TargetModel:
    """Bring the target model into its folder and say what it is."""
    return target(params.target, TargetModel.home)


if __name__ == "__main__":  # what dvc.yaml runs
    run_stage("target", target_flow)
