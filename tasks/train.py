"""How the train stage runs: in `train.processes` processes, and retried once.

A second attempt goes on from the last training state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params
from eagle3.errors import ArtifactError
from eagle3.extract import longest_row
from eagle3.progress import SilentReporter
from eagle3.stream import Streaming
from eagle3.train import train_drafter
from eagle3.work import WORK
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
    params: Params,
    out: Path,
) -> Drafter:
    """Train one drafter; its config and record are kept with the MLflow run, its weights by DVC."""
    size = vocab.size
    with (
        training_team(params.train, size) as team,
        _streaming(target, states, params, WORK / f"vllm-train-{size}.log") as streaming,
    ):
        drafter = train_drafter(
            target,
            corpus,
            states,
            vocab,
            params.drafter,
            params.train,
            out,
            StageReporter(f"train-{size}") if team.leads else SilentReporter(),
            team,
            streaming,
        )
    run = current_run()
    if run is not None:
        run.log_artifact(out / "config.json")
        run.log_artifact(out / Drafter.manifest)
    return drafter


@contextmanager
def _streaming(
    target: TargetModel, states: HiddenStates, params: Params, log_file: Path
) -> Iterator[Streaming | None]:
    """The target that makes states beside training; None where they are all in the store."""
    extract = params.extract
    if states.keep != extract.keep:
        raise ArtifactError(
            f"{HiddenStates.home} was extracted with keep {str(states.keep).lower()}, but "
            f"params.yaml has extract.keep: {str(extract.keep).lower()}; run `dvc repro extract`, "
            "or set it back"
        )
    if extract.keep:
        yield None
        return
    # Late: over stored states nobody waits for transformers to load.
    from eagle3.engines.backend import open_engine

    # An engine that answers wants room for a token after the row.
    longest = longest_row() + 1
    with open_engine(extract.backend, target, params.target, longest, log_file) as engine:
        yield Streaming(engine, extract.ahead_shards, extract.max_nonfinite_rows)
