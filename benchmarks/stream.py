"""Extraction and one epoch of training, states stored first or made on the way: time and disk.

    python benchmarks/stream.py --project . --rows 90

On the first rows of a finished demo's corpus, in turn: extract and train with `extract.keep: true`,
then with false, each from an empty folder, the target loaded wherever a stage needs it. Shards are
small, so that so few rows have a dozen of them. Bytes are those of the train split's states, looked
at ten times a second. The two drafters and curves are compared byte for byte.
"""

import argparse
import os
import threading
import time
from collections.abc import Mapping
from itertools import accumulate, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from extract_overhead import first_rows, save_corpus
from store_results import keep as keep_figures

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.batches import packed_rows
from eagle3.config import Params, load_params
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import Rows, load_rows
from eagle3.stream import Streaming
from eagle3.train import train_drafter
from eagle3.vocab import select_vocab

SIZE = 32000


class FirstStep(ConsoleReporter):
    """Notes when the first optimizer step was done, and how training waited."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0.0
        self.waits: list[float] = []

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """As of any run; and the time."""
        super().progress(label, done, total, unit)
        if label == "training" and not self.first:
            self.first = time.perf_counter()

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """As of any run; and the share of waiting."""
        super().metrics(values, step)
        if "data_wait" in values:
            self.waits.append(values["data_wait"])


class DiskWatch:
    """The most bytes that the train split's states took while the block ran."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "DiskWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.most = max(self.most, sum(map(_bytes, _state_files())))


def _state_files() -> list[Path]:
    homes = (HiddenStates.home, Path(".work"))
    stores = [store for home in homes for store in home.rglob("train.zarr")]
    return [file for store in stores for file in store.rglob("*.*") if "/rows/" not in str(file)]


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except FileNotFoundError:  # deleted since it was listed
        return 0


def steps_of_an_epoch(rows: Rows, params: Params) -> int:
    """Optimizer steps that read no row twice."""
    lengths = np.diff(rows.offsets_R1).tolist()
    batches = packed_rows(lengths, params.train.batch_tokens, params.train.seed)
    read = accumulate(map(len, batches))
    return sum(1 for _ in takewhile(lambda count: count <= len(rows), read))


def run(target: TargetModel, corpus: Corpus, params: Params) -> dict[str, Any]:
    """Extract and train in the current folder."""
    report = FirstStep()
    started, cpu = time.perf_counter(), time.process_time()
    with DiskWatch() as disk:
        engine = TransformersEngine(target, params.target)
        states = extract_hidden_states(
            target, corpus, params.extract, engine, HiddenStates.home, report
        )
        extracted = time.perf_counter()
        vocab = DraftVocab.load(DraftVocab.home(SIZE))
        streaming = None
        if not params.extract.keep:
            engine = TransformersEngine(target, params.target)
            streaming = Streaming(
                engine, params.extract.ahead_shards, params.extract.max_nonfinite_rows
            )
        train_drafter(
            target,
            corpus,
            states,
            vocab,
            params.drafter,
            params.train,
            Drafter.home(SIZE),
            report,
            streaming=streaming,
        )
    over = time.perf_counter()
    return {
        "seconds": round(over - started, 1),
        "seconds_extract": round(extracted - started, 1),
        "seconds_to_first_step": round(report.first - started, 1),
        "processor_seconds": round(time.process_time() - cpu, 1),
        "data_wait": [round(wait, 2) for wait in report.waits],
        "peak_state_bytes": disk.most,
        "state_bytes_left": sum(map(_bytes, _state_files())),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def main() -> None:
    """Run both, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="A finished demo.")
    parser.add_argument("--rows", type=int, default=90, help="Of train; 3 of the other splits.")
    parser.add_argument("--shard-tokens", type=int, default=1024)
    parser.add_argument("--ahead-shards", type=int, default=2)
    args = parser.parse_args()
    project, repository, shipped = args.project.resolve(), Path.cwd(), load_params()
    counts = {"train": args.rows, "validation": 3, "eval": 3}
    splits = {
        split: first_rows(load_rows(project / Corpus.home / f"{split}.zarr"), count)
        for split, count in counts.items()
    }
    steps = steps_of_an_epoch(splits["train"], shipped)
    figures: dict[str, Any] = {}
    made: list[tuple[bytes, str]] = []
    for keep in (True, False):
        sizes = {"shard_tokens": args.shard_tokens, "ahead_shards": args.ahead_shards, "keep": keep}
        train = {"total_steps": steps, "warmup_steps": 2, "validate_every": steps}
        params = shipped.model_copy(
            update={
                "extract": shipped.extract.model_copy(update=sizes),
                "train": shipped.train.model_copy(update=train),
            }
        )
        with TemporaryDirectory(prefix="stream-", dir=project.parent) as name:
            os.chdir(name)
            TargetModel.home.parent.mkdir()
            TargetModel.home.symlink_to(project / TargetModel.home)
            target = TargetModel.load(TargetModel.home)
            corpus = save_corpus(splits, target)
            select_vocab(target, corpus, params.vocab, SIZE, None, DraftVocab.home(SIZE))
            figures["stored" if keep else "streamed"] = run(target, corpus, params)
            weights = (Drafter.home(SIZE) / "model.safetensors").read_bytes()
            made.append((weights, Drafter.curve_home(SIZE).read_text()))
            os.chdir(repository)
    figures |= {
        "same_drafter_and_curve": made[0] == made[1],
        "tokens": {split: rows.num_tokens for split, rows in splits.items()},
        "steps": steps,
        "shard_tokens": args.shard_tokens,
        "ahead_shards": args.ahead_shards,
        "threads": torch.get_num_threads(),
    }
    keep_figures("stream", "demo", figures)


if __name__ == "__main__":
    main()
