"""How the serve stage runs: retried once, since a server can fail by itself."""

from pathlib import Path

from eagle3.artifacts import Corpus, Drafter, HiddenStates, Serving, TargetModel
from eagle3.config import ServeParams
from eagle3.unserved import record_unserved
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter
from tasks.tracking import current_run


@task(name="serve-drafter", retries=1)
def serve(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    drafter: Drafter,
    params: ServeParams,
    out: Path,
) -> Serving:
    """Measure one drafter in the engine that params name; the servers' logs stay with the run."""
    if params.engine == Serving.nowhere:
        return record_unserved((target, corpus, states), drafter, params, out)
    # Late: torch takes seconds, which a drafter that is not served need not wait for.
    from eagle3.serve import serve_drafter

    report = StageReporter(f"serve-{drafter.size}")
    serving = serve_drafter(target, corpus, states, drafter, params, out, report)
    run = current_run()
    if run is not None:
        run.log_artifact(out)
    return serving
