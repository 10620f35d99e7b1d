"""How the train stage runs: in `train.processes` processes, and retried once.

A second attempt goes on from the last training state.
"""

from pathlib import Path

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import DrafterParams, TrainParams
from eagle3.progress import SilentReporter
from eagle3.train import train_drafter
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter
from tasks.team import training_team
from tasks.tracking import current_run


@task(name="train-drafter", retries=1)
def train(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    vocab: DraftVocab,
    drafter_params: DrafterParams,
    params: TrainParams,
    out: Path,
) -> Drafter:
    """Train one drafter; its config and record are kept with the MLflow run, its weights by DVC."""
    with training_team(params, vocab.size) as team:
        report = StageReporter(f"train-{vocab.size}") if team.leads else SilentReporter()
        drafter = train_drafter(
            target, corpus, states, vocab, drafter_params, params, out, report, team
        )
    run = current_run()
    if run is not None:
        run.log_artifact(out / "config.json")
        run.log_artifact(out / Drafter.manifest)
    return drafter
