"""How the evaluate stage runs: once, its report kept with the MLflow run."""

from pathlib import Path

from eagle3.artifacts import Corpus, Drafter, Evaluation, HiddenStates, TargetModel
from eagle3.config import EvaluateParams, TargetParams
from eagle3.evaluate import evaluate_drafter
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter
from tasks.tracking import current_run


@task(name="evaluate-drafter", retries=0)
def evaluate(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    drafter: Drafter,
    params: EvaluateParams,
    target_params: TargetParams,
    out: Path,
) -> Evaluation:
    """Measure acceptance and cost of one drafter."""
    report = StageReporter(f"evaluate-{drafter.size}")
    evaluation = evaluate_drafter(
        target, corpus, states, drafter, params, target_params, out, report
    )
    run = current_run()
    if run is not None:
        run.log_artifact(out)
    return evaluation
