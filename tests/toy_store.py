"""A toy store, and a program that is killed while it writes one: at the n-th touch of the disk.

The program loads everything once and then forks for every kill, so many instants cost little.
"""

import os
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.engines.base import RowStates, Sampling
from eagle3.fill import TokenProgress, fill
from eagle3.progress import ConsoleReporter
from eagle3.refusals import Refusals
from eagle3.store.layout import Header
from eagle3.store.pointer import Where
from eagle3.store.rows import Rows, rows_sha256
from eagle3.store.writer import StateWriter

LENGTHS = [5, 9, 6, 20, 3, 11, 2, 8]
WIDTH = 4

# What Python does to a file system, as the interpreter's own audit events.
DISK_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def toy_rows() -> Rows:
    count = sum(LENGTHS)
    return Rows(
        tokens_N=np.arange(count, dtype=np.int32) * 3,
        loss_mask_N=np.ones(count, np.bool_),
        offsets_R1=np.cumsum([0, *LENGTHS], dtype=np.int64),
        domains=("chat",) * len(LENGTHS),
        row_ids=tuple(f"row{number}" for number in range(len(LENGTHS))),
    )


def toy_header(**changes: Any) -> Header:
    rows = toy_rows()
    facts: dict[str, Any] = {
        "target": "toy",
        "target_fingerprint": "1" * 64,
        "rows_sha256": rows_sha256(rows),
        "tokens": rows.num_tokens,
        "rows": len(rows),
        "hidden_size": WIDTH,
        "aux_layers": (2, 4, 5),
        "last": "before final norm",
        "dtype": "bfloat16",
        "engine": ToyEngine.name,
        "chunk_tokens": 4,
        "shard_tokens": 16,
    }
    return Header.model_validate(facts | changes)


class ToyEngine:
    """States that are a function of token and place."""

    name = "toy 1.0"

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("a toy does not talk")

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        found = []
        for row in rows:
            tokens_T = torch.tensor(row, dtype=torch.float32) + torch.arange(len(row)) / 7
            all_T4H = torch.sin(tokens_T[:, None, None] + torch.arange(4 * WIDTH).view(4, WIDTH))
            found.append(RowStates(all_T4H[:, :3], all_T4H[:, 3]))
        return found


class Silent(ConsoleReporter):
    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        pass


def write_toy_store(where: Where, **changes: Any) -> Where:
    """Start a store or go on with it, to its end."""
    rows = toy_rows()
    writer = StateWriter(where, toy_header(**changes), rows)
    progress = TokenProgress(Silent(), rows.num_tokens)
    fill(writer, ToyEngine(), "train", progress, Refusals(0))
    return where


def run_until(path: Path, touch: int) -> int:
    """Write in a child that kills itself at its `touch`-th event under `path`; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    touches = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal touches
        if event in DISK_EVENTS and str(path.parent) in str(args[0]):
            touches += 1
            if touches == touch:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    write_toy_store(path)
    os._exit(0)


def main(folder: Path, first: int, step: int) -> None:
    """Kill at touch `first`, then `step` later, each in its own store, until a run survives."""
    for touch in count(first, step):
        status = run_until(folder / f"{touch:04d}" / "train.zarr", touch)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
