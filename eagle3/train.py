"""The `train` stage: one drafter, trained over hidden states, its best checkpoint kept.

The states are the extract stage's, or made here while they are read (`extract.keep: false`).
"""

import csv
import io
import shutil
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from eagle3.artifacts import (
    Corpus,
    Drafter,
    DraftVocab,
    HiddenStates,
    TargetModel,
    file_sha256,
    write_atomically,
)
from eagle3.config import DrafterParams, TrainParams
from eagle3.contract import WEIGHTS_FILE
from eagle3.errors import ArtifactError
from eagle3.kept import BEST, NEWEST
from eagle3.progress import Reporter
from eagle3.splits import open_split
from eagle3.store.rows import load_rows
from eagle3.stream import StateStream, Streaming
from eagle3.team import ALONE, Team
from eagle3.trainer import Trainer
from eagle3.training_state import STATE
from eagle3.warm_start import init_from_sha256
from eagle3.work import publish, workspace


def train_drafter(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    vocab: DraftVocab,
    drafter_params: DrafterParams,
    params: TrainParams,
    out: Path,
    report: Reporter,
    team: Team = ALONE,
    streaming: Streaming | None = None,
) -> Drafter:
    """Train the drafter of one draft vocabulary, and put its best checkpoint into `out`.

    Every process of a team makes this call; the one that leads writes, and all return its record.
    `streaming` makes the train split's states where `states` were extracted with keep false.

    Raises:
        ArtifactError: an input was made from another target or corpus, or the engine is not the
            one that extracted `states`.
        CheckpointError: the training state of an earlier, killed run is damaged, or
            `train.init_from` is not a drafter that this run can go on from.
        TrainingError: the loss is no longer a number.
    """
    states.require_made_from(corpus, HiddenStates.home)
    vocab.require_made_from(corpus, DraftVocab.home(vocab.size))
    made_from = {record.stage: record.fingerprint for record in (target, corpus, states, vocab)}
    made_from |= init_from_sha256(params.init_from)
    # Without what changes no number of the run: it goes on with any.
    how = params.model_dump(exclude={"processes", "reader_processes", "sharding", "recompute"})
    chosen = {"drafter": drafter_params.model_dump(), "train": how}
    work = workspace(f"train@{vocab.size}", {**made_from, **chosen})
    with ExitStack() as opened:
        stream = None
        if streaming is not None:
            stream = opened.enter_context(closing(_stream(streaming, params, work, report)))
        trainer = Trainer(target, vocab, drafter_params, params, work, report, team, stream)
        trainer.run()
    if team.leads:
        _publish_result(trainer, vocab, made_from, chosen, out)
    team.meet()
    return Drafter.load(out)


def _stream(how: Streaming, params: TrainParams, work: Path, report: Reporter) -> StateStream:
    """The train split's states, to be such as the extract stage would have made."""
    _, validation = open_split("validation")
    if how.engine.name != validation.header.engine:
        raise ArtifactError(
            f"{HiddenStates.home} was extracted by {validation.header.engine}, but what would make "
            f"the training split's states is {how.engine.name}; run `dvc repro --force extract` on "
            "this machine, so that all splits are of one engine"
        )
    rows = load_rows(Corpus.home / "train.zarr")
    return StateStream(work / "train.zarr", rows, validation.header, how, params, report)


def _publish_result(
    trainer: Trainer,
    vocab: DraftVocab,
    made_from: dict[str, str],
    chosen: dict[str, Any],
    out: Path,
) -> None:
    work = trainer.work
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    shutil.copytree(work / BEST, result, copy_function=_link)
    shutil.copytree(work / STATE, result / STATE, copy_function=_link)
    if trainer.params.keep_checkpoints:
        shutil.copytree(work / NEWEST, result / NEWEST, copy_function=_link)
    best = trainer.best
    record = Drafter(
        made_from=made_from,
        size=vocab.size,
        draft_vocab=vocab.draft_vocab,
        best_step=best["step"],
        acceptance_length_validation=best["acceptance_length"],
        refused_rows=len(trainer.train_store.refused),
        trainable_parameters=sum(p.numel() for p in trainer.net.parameters() if p.requires_grad),
        sha256=file_sha256(result / WEIGHTS_FILE),
        params=chosen,
    )
    record.save(result)
    write_atomically(Drafter.curve_home(vocab.size), _csv(trainer.curve))
    publish(result, out)
    shutil.rmtree(work)


def _csv(curve: list[dict[str, float]]) -> str:
    columns = list(dict.fromkeys(key for point in curve for key in point))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(curve)
    return text.getvalue()


def _link(source: str, place: str) -> None:
    Path(place).hardlink_to(source)
