"""What 8-bit states cost in acceptance: drafters trained on float8 and on bfloat16 states.

    python benchmarks/float8_acceptance.py --project . --size 32000 --folder /tmp/f8

From a finished demo: its bfloat16 states are transcoded into a float8 store (the target does not
run), and a drafter is trained on that with the demo's params. It is compared with the demo's own
drafter, of the same params on the bfloat16 states, by replay over the eval rows (states in float32,
the same for both) and over the validation rows, which chose each run's checkpoint. The interval is
a bootstrap over eval rows, paired: it knows of the rows that were drawn, not of the chance in
training.
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
from eagle3.artifacts import SPLITS, Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params, VocabSize, load_params, parse_size
from eagle3.engines.base import RowStates, Sampling
from eagle3.errors import EngineError
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


class Stored:
    """An engine that answers with the states of a finished extraction."""

    def __init__(self, project: Path) -> None:
        self._found: dict[tuple[int, ...], tuple[StateStore, slice]] = {}
        for split in SPLITS:
            store = StateStore.open(project / HiddenStates.home / f"{split}.zarr")
            self.name = f"{store.header.engine}, transcoded from {store.header.dtype}"
            rows = store.rows
            for row in range(len(rows)):
                span = rows.span(row)
                self._found[tuple(rows.tokens_N[span].tolist())] = (store, span)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Refuse: the answers are those of the corpus.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"stored states cannot answer {len(prompts)} prompts ({sampling}); "
            "take the corpus of the project"
        )

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """Look each row up."""
        found = []
        for row in rows:
            store, span = self._found[tuple(row)]
            found.append(RowStates(*(part.float() for part in store.read(span.start, span.stop))))
        return found


def prepare(project: Path, folder: Path) -> None:
    """A project of its own that shares the demo's target, corpus and vocabularies; enter it."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for shared in ("target", "corpus", "vocab"):
        link = folder / "data" / shared
        if not link.is_symlink():
            link.symlink_to(project / "data" / shared)
    os.chdir(folder)


def train_on_float8(params: Params, engine: Stored, size: VocabSize) -> Drafter:
    """Extract and train in the current folder."""
    report = ConsoleReporter()
    target, corpus = TargetModel.load(TargetModel.home), Corpus.load(Corpus.home)
    vocab = DraftVocab.load(DraftVocab.home(size))
    extract = params.extract.model_copy(update={"state_dtype": "float8"})
    states = extract_hidden_states(target, corpus, extract, engine, HiddenStates.home, report)
    args = (target, corpus, states, vocab, params.drafter, params.train, Drafter.home(size), report)
    return train_drafter(*args)


def replayed(drafter: Drafter, project: Path) -> dict[int, dict[int, Tally]]:
    """Tallies of the eval rows for the drafter of the current folder; the project's eval states."""
    target = TargetModel.load(TargetModel.home)
    net, maps = load_checked_drafter(drafter, target)
    rows = load_rows(Corpus.home / "eval.zarr")
    read = StateStore.open(project / HiddenStates.home / "eval.zarr").read
    embedding_VH = read_embedding(target).to(torch.float32)
    return replay_rows(net.eval(), embedding_VH, maps, rows, read, KS, range(len(rows)))


def figures(drafter: Drafter, tallies: dict[int, dict[int, Tally]]) -> dict[str, float]:
    """Of one drafter and the store that it was trained on, in the current folder."""
    info = StateStore.open(HiddenStates.home / "train.zarr").info
    facts = {
        "ratio": round(info.ratio, 4),
        "bytes_per_token": round(info.bytes / info.tokens, 1),
        "best_step": drafter.best_step,
        "acceptance_length_validation": round(drafter.acceptance_length_validation, 4),
    }
    for k in KS:
        total = sum((tally[k] for tally in tallies.values()), Tally.empty(k))
        facts[f"acceptance_length_k{k}"] = round(total.acceptance_length, 4)
        facts[f"drafts_k{k}"] = total.drafts
    return facts


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
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="A finished demo.")
    parser.add_argument("--folder", type=Path, required=True, help="Where to work; kept.")
    parser.add_argument("--size", default="32000")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    project, repository = args.project.resolve(), Path.cwd()
    size = parse_size(args.size)
    params = load_params(project / "params.yaml")
    os.chdir(project)
    baseline = Drafter.load(Drafter.home(size))
    trained = baseline.params["train"]
    wanted = {key: value for key, value in params.train.model_dump().items() if key in trained}
    assert trained == wanted, "params.yaml has changed since the demo's drafter was trained"
    theirs = replayed(baseline, project)
    found: dict[str, Any] = {"bfloat16": figures(baseline, theirs)}
    os.chdir(repository)
    prepare(project, args.folder.resolve())
    drafter = train_on_float8(params, Stored(project), size)
    ours = replayed(drafter, project)
    found["float8"] = figures(drafter, ours)
    os.chdir(repository)
    facts = {
        "steps": params.train.total_steps,
        "seed": params.train.seed,
        "states": "float8 transcoded from the stored bfloat16",
        **found,
        "float8_less_bfloat16_95": {f"k{k}": paired_interval(ours, theirs, k) for k in KS},
    }
    keep("float8_acceptance", args.size, facts)


if __name__ == "__main__":
    main()
