"""What a head, a network and a loss are worth: one short training run each, on one project's data.

    make demo
    python benchmarks/choices.py 32000 --steps 60 > choices.json

Run it in a project whose vocabulary stage is done; nothing of the project is changed. Each arm is
params.yaml with a few keys changed, trained for the same steps on the same batches, one after the
other. A line of JSON per arm, of its best checkpoint:

acceptance_length_*  replay at k = 3, greedy: what a drafter is judged by when the target is greedy
alpha_stepI          sum min(p, q) at step I of the training-time test over the eval split, tokens
                     teacher-forced, p not renormalised: the share of drafts that rejection sampling
                     accepts at temperature 1. What tv and lk_alpha train for.
seconds_per_step     validations included; `load` is the one-minute load average before and after
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eagle3.artifacts import DraftVocab, Split, TargetModel
from eagle3.batches import read_batch
from eagle3.checkpoint import load_drafter
from eagle3.config import DrafterParams, TrainParams, load_params, parse_size
from eagle3.drafter import DrafterNet
from eagle3.kept import BEST
from eagle3.loss import head_loss, predict_target
from eagle3.progress import ConsoleReporter
from eagle3.replay import replay_rows
from eagle3.splits import open_split
from eagle3.trainer import Trainer
from eagle3.ttt import plan_unrolling, unroll

K = 3
VALIDATIONS = 3
"""Of each run, beside the one before its first step."""

NORMS = {"fc_norm": True, "norm_output": True}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "head at random": ({}, {"head_init": "random"}),
    "head frozen": ({}, {"head": "frozen"}),
    "EAGLE-3.1 norms": (NORMS, {}),
    "fc_norm alone": ({"fc_norm": True}, {}),
    "norm_output alone": ({"norm_output": True}, {}),
    "tv": ({}, {"loss": "tv"}),
    "lk_alpha": ({}, {"loss": "lk_alpha"}),
}


def measure(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and judge its best checkpoint."""
    params = load_params()
    size = parse_size(args.size)
    of_network, of_training = ARMS[arm]
    drafter = DrafterParams.model_validate(params.drafter.model_dump() | of_network)
    training = params.train.model_dump() | of_training
    training |= {
        "total_steps": args.steps,
        "warmup_steps": args.steps * params.train.warmup_steps // params.train.total_steps,
        "validate_every": args.steps // VALIDATIONS,
        "validate_draft_tokens": K,
    }
    target = TargetModel.load(TargetModel.home)
    vocab = DraftVocab.load(DraftVocab.home(size))
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        train = TrainParams.model_validate(training)
        trainer = Trainer(target, vocab, drafter, train, Path(folder), ConsoleReporter())
        started = time.monotonic()
        trainer.run()
        seconds = time.monotonic() - started
        net, _ = load_drafter(Path(folder) / BEST)
    load.append(os.getloadavg()[0])
    losses = [point["loss"] for point in trainer.curve if "loss" in point]
    return {
        "arm": arm,
        "changed": {"drafter": of_network, "train": of_training},
        "draft_vocab": vocab.draft_vocab,
        "steps": args.steps,
        "seed": train.seed,
        "best_step": trainer.best["step"],
        f"acceptance_length_validation_k{K}": trainer.best["acceptance_length"],
        f"acceptance_length_eval_k{K}": replayed(trainer, net, "eval"),
        **{f"alpha_step{i}": a for i, a in enumerate(acceptance(trainer, net, "eval"))},
        "loss_last": losses[-1],
        "trainable": sum(p.numel() for p in trainer.net.parameters() if p.requires_grad),
        "seconds_per_step": seconds / args.steps,
        "load": load,
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", "benchmarks/choices.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


def replayed(trainer: Trainer, net: DrafterNet, split: Split) -> float:
    """Acceptance length at k over a split."""
    rows, store = open_split(split)
    embedding_VH = trainer.embedding_VH.float()
    found = replay_rows(
        net, embedding_VH, trainer.maps, rows, store.read, (K,), store.rows_with_states(rows)
    )
    drafts = sum(tallies[K].drafts for tallies in found.values())
    return 1 + sum(tallies[K].accepted for tallies in found.values()) / drafts


@torch.no_grad()
def acceptance(trainer: Trainer, net: DrafterNet, split: Split) -> list[float]:
    """alpha of each of k steps, over all supervised predictions of a split."""
    rows, store = open_split(split)
    accepted, counted = [0.0] * K, [0] * K
    for row in store.rows_with_states(rows):
        batch = read_batch(rows, store.read_rows, [row], trainer.device)
        batch = batch.with_states_as(torch.float32)
        unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, K)
        last_UH = batch.last_NH[unrolling.predictors_U]
        prediction = predict_target(trainer.head, trainer.maps, last_UH, "tv")
        embedding_NH = trainer.embedding_VH[batch.tokens_N].float()
        for index, (step, state) in enumerate(unroll(net, batch, embedding_NH, unrolling)):
            hidden = net.head_input(state[step.counted_M])
            missed, _ = head_loss(hidden, net.lm_head.weight, prediction, step.predictor_M)
            accepted[index] += len(hidden) - missed.item()
            counted[index] += len(hidden)
    return [share / count for share, count in zip(accepted, counted, strict=True)]


def main() -> None:
    """Measure the arms that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", help="draft vocabulary: one of vocab.sizes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    args = parser.parse_args()
    for arm in args.arms:
        print(json.dumps(measure(arm, args)), flush=True)


if __name__ == "__main__":
    main()
