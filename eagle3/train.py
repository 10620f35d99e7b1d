"""The `train` stage: one drafter, trained over stored hidden states, its best checkpoint kept."""

import csv
import io
import shutil
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
from eagle3.kept import BEST, NEWEST
from eagle3.progress import Reporter
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
) -> Drafter:
    """Train the drafter of one draft vocabulary, and put its best checkpoint into `out`.

    Every process of a team makes this call; the one that leads writes, and all return its record.

    Raises:
        ArtifactError: an input was made from another target or corpus.
        CheckpointError: the training state of an earlier, killed run is damaged, or
            `train.init_from` is not a drafter that this run can go on from.
        TrainingError: the loss is no longer a number.
    """
    states.require_made_from(corpus, HiddenStates.home)
    vocab.require_made_from(corpus, DraftVocab.home(vocab.size))
    made_from = {record.stage: record.fingerprint for record in (target, corpus, states, vocab)}
    made_from |= init_from_sha256(params.init_from)
    # Without what changes no number of the run: it goes on with any.
    how = params.model_dump(exclude={"processes", "sharding", "recompute"})
    chosen = {"drafter": drafter_params.model_dump(), "train": how}
    work = workspace(f"train@{vocab.size}", {**made_from, **chosen})
    trainer = Trainer(target, vocab, drafter_params, params, work, report, team)
    trainer.run()
    if team.leads:
        _publish_result(trainer, vocab, made_from, chosen, out)
    team.meet()
    return Drafter.load(out)


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
