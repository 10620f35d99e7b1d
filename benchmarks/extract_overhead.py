"""What the store adds to the target's own work: extraction beside plain forward passes.

    python benchmarks/extract_overhead.py --project . --rows 40

On the same rows of a finished demo's corpus, in turn, several times: every row through the target's
decoder (no head, no hooks, nothing kept), every row through the whole model (with its head), and
the extract stage from rows to a published, synced store. `overhead` is the stage's time over the
decoder's, less one, of the medians; the seconds of all runs are kept. `overhead_cpu` is the same of
processor time, which other work on the machine disturbs less, and which leaves waiting for the disk
out.

Shapes: T tokens of one row.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from store_results import keep

from eagle3.artifacts import SPLITS, Corpus, TargetModel
from eagle3.config import load_params
from eagle3.engines.transformers import TransformersEngine, find_decoder
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import Rows, load_rows, rows_sha256, save_rows
from eagle3.target.model import load_model

OUT = Path("hidden_states")


def first_rows(rows: Rows, count: int) -> Rows:
    """The first rows of a split."""
    stop = int(rows.offsets_R1[count])
    return Rows(
        rows.tokens_N[:stop],
        rows.loss_mask_N[:stop],
        rows.offsets_R1[: count + 1],
        rows.domains[:count],
        rows.row_ids[:count],
    )


def save_corpus(splits: dict[str, Rows], target: TargetModel) -> Corpus:
    """In the current folder."""
    for split, rows in splits.items():
        save_rows(rows, Corpus.home / f"{split}.zarr")
    return Corpus(
        made_from={"target": target.fingerprint},
        tokens={split: splits[split].num_tokens for split in SPLITS},
        supervised_tokens={split: int(splits[split].loss_mask_N.sum()) for split in SPLITS},
        rows={split: len(splits[split]) for split in SPLITS},
        sha256={split: rows_sha256(splits[split]) for split in SPLITS},
        counts={},
    )


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> None:
    """Time the three in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="A finished demo.")
    parser.add_argument("--rows", type=int, default=40, help="Of train; 3 of the other splits.")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    project, repository = args.project.resolve(), Path.cwd()
    params = load_params(project / "params.yaml")
    home = project / TargetModel.home
    target = TargetModel.load(home)
    counts = {"train": args.rows, "validation": 3, "eval": 3}
    splits = {
        split: first_rows(load_rows(project / Corpus.home / f"{split}.zarr"), count)
        for split, count in counts.items()
    }
    engine = TransformersEngine(target, params.target, home)
    model = load_model(target, params.target, home)
    decoder = find_decoder(model)
    texts = [
        torch.tensor([rows.tokens_N[rows.span(row)].tolist()])
        for rows in splits.values()
        for row in range(len(rows))
    ]

    @torch.no_grad()
    def forward(module: torch.nn.Module) -> None:
        for ids_1T in texts:
            module(input_ids=ids_1T, use_cache=False)

    seconds: dict[str, list[tuple[float, float]]] = {
        "decoder": [],
        "whole_model": [],
        "extract": [],
    }
    with TemporaryDirectory(prefix="extract-overhead-") as name:
        os.chdir(name)
        corpus = save_corpus(splits, target)
        forward(decoder)  # the first pass of a process pays for torch's start
        for _ in range(args.repeats):
            shutil.rmtree(OUT, ignore_errors=True)
            seconds["decoder"].append(seconds_of(lambda: forward(decoder)))
            seconds["whole_model"].append(seconds_of(lambda: forward(model)))
            seconds["extract"].append(
                seconds_of(
                    lambda: extract_hidden_states(
                        target, corpus, params.extract, engine, OUT, ConsoleReporter()
                    )
                )
            )
        os.chdir(repository)
    middle, middle_cpu = (
        {name: statistics.median(run[clock] for run in found) for name, found in seconds.items()}
        for clock in (0, 1)
    )
    tokens = int(np.sum([rows.num_tokens for rows in splits.values()]))
    facts = {
        "target": target.source,
        "engine": engine.name,
        "threads": torch.get_num_threads(),
        "rows": len(texts),
        "tokens": tokens,
        "seconds_wall_cpu": {
            name: [[round(clock, 2) for clock in run] for run in found]
            for name, found in seconds.items()
        },
        "tokens_per_s": {name: round(tokens / middle[name]) for name in middle},
        "overhead": round(middle["extract"] / middle["decoder"] - 1, 4),
        "overhead_cpu": round(middle_cpu["extract"] / middle_cpu["decoder"] - 1, 4),
        "overhead_over_whole_model": round(middle["extract"] / middle["whole_model"] - 1, 4),
    }
    keep("extract_overhead", "smollm2", facts)


if __name__ == "__main__":
    main()
