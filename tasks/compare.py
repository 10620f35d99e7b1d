"""How the compare stage runs: once, its report shown by Prefect and kept by MLflow."""

from collections.abc import Sequence
from pathlib import Path

from eagle3 import report
from eagle3.artifacts import Decision, DraftVocab, Evaluation, write_atomically
from eagle3.curves import acceptance_curves
from tasks.prefect_lazy import publish_markdown, task
from tasks.tracking import current_run


@task(name="compare-sizes", retries=0)
def compare(evaluations: Sequence[Evaluation], vocabs: Sequence[DraftVocab], out: Path) -> Decision:
    """Compare the sizes and publish the decision."""
    decision = report.compare(evaluations, vocabs, out)
    write_atomically(out / "acceptance.csv", acceptance_curves(decision))
    markdown = out / "decision.md"
    publish_markdown("decision", markdown.read_text())
    run = current_run()
    if run is not None:
        run.log_artifact(markdown)
        run.log_artifact(out / "plots")
    return decision
