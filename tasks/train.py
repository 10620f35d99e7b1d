"""How the train stage runs: retried once, since it goes on from its last training state."""

from pathlib import Path

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import DrafterParams, TrainParams
from eagle3.train import train_drafter
from tasks.prefect_lazy import task
from tasks.reporter import StageReporter
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
    report = StageReporter(f"train-{vocab.size}")
    drafter = train_drafter(target, corpus, states, vocab, drafter_params, params, out, report)
    run = current_run()
    if run is not None:
        run.log_artifact(out / "config.json")
        run.log_artifact(out / Drafter.manifest)
    return drafter
