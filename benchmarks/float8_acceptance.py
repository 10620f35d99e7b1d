"""What 8-bit states cost in acceptance: drafters trained on float8 and on bfloat16 states.

    python benchmarks/float8_acceptance.py --project . --size 32000 --steps 120 --folder /tmp/f8

From a finished demo's target, corpus and draft vocabulary: the target reads the corpus once, both
stores are written from that, and a drafter is trained on each with the demo's params and the given
number of steps. Each store's best checkpoint is replayed over the eval rows (states in float32, the
same for both). The interval is a bootstrap over eval rows, paired: it knows of the rows that were
drawn, not of the chance in training.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store_results import keep

from eagle3.acceptance import Tally
from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params, StateDtype, load_params, parse_size
from eagle3.engines.base import RowStates, Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.pair import load_checked_drafter
from eagle3.progress import ConsoleReporter
from eagle3.replay import replay_rows
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore
from eagle3.target import read_embedding
from eagle3.train import train_drafter

KS = (1, 3)
DRAWS = 10_000


class ReadOnce:
    """An engine that runs each row once and remembers its states, in float32."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.name, self._engine = engine.name, engine
        self._found: dict[tuple[int, ...], RowStates] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """As the engine."""
        return self._engine.generate(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """As the engine, or as it said before."""
        for row in rows:
            if tuple(row) not in self._found:
                [self._found[tuple(row)]] = self._engine.states([row])
        return [self._found[tuple(row)] for row in rows]


def prepare(project: Path, folder: Path) -> None:
    """A project of its own that shares the demo's target, corpus and vocabularies; enter it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for shared in ("target", "corpus", "vocab"):
        link = folder / "data" / shared
        if not link.is_symlink():
            link.symlink_to(project / "data" / shared)
    os.chdir(folder)


def train_on(dtype: StateDtype, params: Params, engine: ReadOnce, size: str) -> dict[str, Any]:
    """Extract, train and replay in the current folder: figures, and the tally of each eval row."""
    report = ConsoleReporter()
    target, corpus = TargetModel.load(TargetModel.home), Corpus.load(Corpus.home)
    vocab = DraftVocab.load(DraftVocab.home(parse_size(size)))
    extract = params.extract.model_copy(update={"state_dtype": dtype})
    states = extract_hidden_states(target, corpus, extract, engine, HiddenStates.home, report)
    home = Drafter.home(vocab.size)
    args = (target, corpus, states, vocab, params.drafter, params.train, home, report)
    drafter = train_drafter(*args)
    net, maps = load_checked_drafter(drafter, target)
    rows = load_rows(Corpus.home / "eval.zarr")
    read = StateStore.open(HiddenStates.home / "eval.zarr").read
    embedding_VH = read_embedding(target).to(torch.float32)
    tallies = replay_rows(net.eval(), embedding_VH, maps, rows, read, KS, range(len(rows)))
    info = StateStore.open(HiddenStates.home / "train.zarr").info
    return {
        "ratio": round(info.ratio, 4),
        "bytes_per_token": round(info.bytes / info.tokens, 1),
        "best_step": drafter.best_step,
        "acceptance_length_validation": round(drafter.acceptance_length_validation, 4),
        "tallies": tallies,
    }


def paired_interval(
    ours: dict[int, dict[int, Tally]], theirs: dict[int, dict[int, Tally]], k: int
) -> list[float]:
    """95% interval of the difference of two acceptance lengths, ours less theirs."""
    draw = np.random.default_rng(0)
    counts_R4 = np.array(
        [
            (a[k].accepted, a[k].drafts, b[k].accepted, b[k].drafts)
            for a, b in zip(ours.values(), theirs.values(), strict=True)
        ]
    )
    picked_DR = draw.integers(0, len(counts_R4), size=(DRAWS, len(counts_R4)))
    sums_D4 = counts_R4[picked_DR].sum(axis=1)
    difference_D = sums_D4[:, 0] / sums_D4[:, 1] - sums_D4[:, 2] / sums_D4[:, 3]
    return [round(float(end), 4) for end in np.percentile(difference_D, [2.5, 97.5])]


def main() -> None:
    """Train both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="A finished demo.")
    parser.add_argument("--folder", type=Path, required=True, help="Where to work; kept.")
    parser.add_argument("--size", default="32000")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="Of training.")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    project, repository = args.project.resolve(), Path.cwd()
    params = load_params(project / "params.yaml")
    training = params.train.model_copy(update={"total_steps": args.steps, "seed": args.seed})
    params = params.model_copy(update={"train": training})
    target = TargetModel.load(project / TargetModel.home)
    engine = ReadOnce(TransformersEngine(target, params.target, project / TargetModel.home))
    found = {}
    for dtype in ("bfloat16", "float8"):
        prepare(project, args.folder.resolve() / f"{dtype}-{args.steps}-{args.seed}")
        found[dtype] = train_on(dtype, params, engine, args.size)
        os.chdir(repository)
    tallies = {dtype: facts.pop("tallies") for dtype, facts in found.items()}
    for dtype, facts in found.items():
        for k in KS:
            total = sum((tally[k] for tally in tallies[dtype].values()), Tally.empty(k))
            facts[f"acceptance_length_k{k}"] = round(total.acceptance_length, 4)
            facts[f"drafts_k{k}"] = total.drafts
    differences = {f"k{k}": paired_interval(tallies["float8"], tallies["bfloat16"], k) for k in KS}
    facts = {"steps": args.steps, "seed": args.seed, "size": args.size, **found}
    facts["float8_less_bfloat16_95"] = differences
    keep("float8_acceptance", f"{args.size}, {args.steps} steps, seed {args.seed}", facts)


if __name__ == "__main__":
    main()
