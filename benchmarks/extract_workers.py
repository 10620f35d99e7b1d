"""Extraction by workers on Ray against one process, on the target and rows of a project's folder.

    python benchmarks/extract_workers.py PROJECT --rows 60 --cores 2

Reads PROJECT/data/{target,corpus} and writes nothing there. The first rows of each split go through
`eagle3.extract` three times, each in a fresh process: one process with all cores, one process with
one core, and a worker per core with one core each. Prints one JSON object: seconds before the
filling (Ray started, the first target loaded), seconds and tokens a second of the filling (while
the other workers' targets may still be loading), and whether the bytes are equal. They are promised
to be equal for equal threads, so the first run may differ from the others in last bits.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from store_results import keep

from eagle3.artifacts import SPLITS, Corpus, HiddenStates, Split, TargetModel
from eagle3.config import load_params
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_by
from eagle3.fill import TokenProgress, fill
from eagle3.progress import SilentReporter
from eagle3.ray_worker import WorkerJob
from eagle3.ray_workers import ray_workers
from eagle3.refusals import Refusals
from eagle3.store.rows import Rows, load_rows, rows_sha256, save_rows
from eagle3.store.writer import StateWriter


def first_rows(rows: Rows, count: int) -> Rows:
    """The first rows of a split."""
    count = min(count, len(rows))
    tokens = int(rows.offsets_R1[count])
    return Rows(
        tokens_N=rows.tokens_N[:tokens],
        loss_mask_N=rows.loss_mask_N[:tokens],
        offsets_R1=rows.offsets_R1[: count + 1],
        domains=rows.domains[:count],
        row_ids=rows.row_ids[:count],
    )


def cut_corpus(project: Path, folder: Path, counts: Mapping[Split, int]) -> int:
    """A small project in `folder`; returns its tokens."""
    (folder / "data").mkdir()
    (folder / TargetModel.home).symlink_to((project / TargetModel.home).resolve())
    corpus = Corpus.load(project / Corpus.home)
    rows = {
        split: first_rows(load_rows(project / Corpus.home / f"{split}.zarr"), counts[split])
        for split in SPLITS
    }
    for split, each in rows.items():
        save_rows(each, folder / Corpus.home / f"{split}.zarr")
    cut = corpus.model_copy(
        update={
            "tokens": {split: each.num_tokens for split, each in rows.items()},
            "rows": {split: len(each) for split, each in rows.items()},
            "sha256": {split: rows_sha256(each) for split, each in rows.items()},
        }
    )
    cut.save(folder / Corpus.home)
    return sum(cut.tokens.values())


def extract(workers: int, params_file: Path, shard_tokens: int) -> dict[str, Any]:
    """Extract in the current directory; seconds before the filling and of it."""
    started = time.perf_counter()
    params = load_params(params_file)
    target, corpus = TargetModel.load(TargetModel.home), Corpus.load(Corpus.home)
    extract_params = params.extract.model_copy(
        update={"chunk_tokens": shard_tokens, "shard_tokens": shard_tokens}
    )
    if workers == 1:
        engine = TransformersEngine(target, params.target)
        opened: Any = nullcontext()
    else:
        job = WorkerJob(
            folder=Path.cwd(),
            target=target,
            params=params.target,
            threads=torch.get_num_threads(),
        )
        opened = ray_workers(job, workers, None, params.target.device)
    with opened as crew:
        name = engine.name if crew is None else crew.engine
        timing: dict[str, float] = {}

        def fill_stores(
            stores: Mapping[Split, StateWriter], progress: TokenProgress, refusals: Refusals
        ) -> None:
            timing["before"] = time.perf_counter() - started
            if crew is not None:
                crew.fill(stores, progress, refusals)
            else:
                for split, store in stores.items():
                    fill(store, engine, split, progress, refusals)
            timing["filling"] = time.perf_counter() - started - timing["before"]

        extract_by(
            target, corpus, extract_params, name, fill_stores, HiddenStates.home, SilentReporter()
        )
    return {
        "workers": workers,
        "threads_each": torch.get_num_threads(),
        "seconds_before": round(timing["before"], 2),
        "seconds_filling": round(timing["filling"], 2),
        "sha256": tree_sha256(HiddenStates.home),
    }


def tree_sha256(folder: Path) -> str:
    """Hash of every file's name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def in_fresh_process(
    project: Path, rows: int, shard_tokens: int, workers: int, threads: int
) -> dict[str, Any]:
    """Run `extract` on a cut corpus in a process with so many threads."""
    counts: dict[Split, int] = {"train": rows, "validation": 4, "eval": 4}
    with tempfile.TemporaryDirectory() as name:
        tokens = cut_corpus(project, Path(name), counts)
        command = [
            *(sys.executable, str(Path(__file__).resolve()), str(project)),
            *("--shard-tokens", str(shard_tokens), "--child", str(workers)),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        done = subprocess.run(
            command, cwd=name, env=environment, check=True, stdout=subprocess.PIPE
        )
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"tokens_a_second": round(tokens / result["seconds_filling"], 1)}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--shard-tokens", type=int, default=1024)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    project = args.project.resolve()
    if args.child:
        ours = Path(__file__).parents[1] / "params.yaml"
        print(json.dumps(extract(args.child, ours, args.shard_tokens)))
        return
    runs = [
        in_fresh_process(project, args.rows, args.shard_tokens, workers, threads)
        for workers, threads in ((1, args.cores), (1, 1), (args.cores, 1))
    ]
    equal = len({run.pop("sha256") for run in runs[1:]}) == 1
    runs[0].pop("sha256")
    facts = {"rows": args.rows, "bytes_equal_at_one_thread": equal, "runs": runs}
    keep("extract_workers", f"{args.rows} rows, {args.cores} cores", facts)


if __name__ == "__main__":
    main()
