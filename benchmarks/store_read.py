"""Writing and reading hidden states: the store beside what others do, on one disk in one run.

    python benchmarks/store_read.py --store data/hidden_states/train.zarr --synthetic-gb 6

GB/s are decoded bytes, 4 H 2 a token in bfloat16, over wall time; `per_core` is over the processor
time of the whole process instead, so what one core gives if it only does that. Before every reading
the layout's files leave the page cache (POSIX_FADV_DONTNEED); the host of a virtual machine may
keep what this machine has forgotten. Written files are synced within the timed writing.

Rows are read in shuffled orders, up to --shuffled-gb of them, in two ways. `shuffled`: each row
before the next is asked for. `batched`: as the trainer reads, all rows of a batch at once, laid end
to end, with one thread for each core; the other layouts get as many threads for their files.

Layouts are written, read and removed one after the other, so the disk holds one at a time; of
--layouts, plain, bfloat16 and safetensors are always needed.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from store_layouts import Layout, Npy, Ours, Plain, SafetensorsRows, TorchRows, decoded
from store_results import keep
from store_states import States, kimi_shaped, real_states

from eagle3.batches import packed_rows

# What one H200 reads while it trains at Kimi-K2.5's shape: 13,700 tokens/s (docs/results-train.md)
# of 57,344 bytes.
H200_GB_S = 0.75
# train.batch_tokens of the two presets.
DEMO_BATCH_TOKENS, KIMI_BATCH_TOKENS = 512, 8192


def timed(work: Callable[[], int]) -> dict[str, float]:
    """Speed of work that returns the decoded bytes it moved."""
    cpu, started = cpu_seconds(), time.perf_counter()
    moved = work()
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    return {
        "gb": round(moved / 1e9, 3),
        "gb_s": round(moved / seconds / 1e9, 3),
        "per_core": round(moved / max(cpu, 1e-3) / 1e9, 3),
    }


def cpu_seconds() -> float:
    """User and system time of all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(layout: Layout, shuffled_gb: float, batch_tokens: int, repeats: int) -> dict[str, Any]:
    """Write, read in order and read rows in another order; the median of the readings."""
    states = layout.states
    total = states.tokens * states.bytes_per_token

    def write() -> int:
        layout.write()
        layout.make_durable()
        return total

    def read_all() -> int:
        layout.open()
        return layout.read_all()

    facts: dict[str, Any] = {"write": timed(write)}
    facts["bytes_per_token"] = round(layout.bytes / states.tokens, 1)
    facts["ratio"] = round(layout.bytes / total, 4)
    facts["sequential"] = median([cold(layout, read_all) for _ in range(repeats)])
    if not isinstance(layout, Plain):
        order = shuffled_rows(states, shuffled_gb)

        def read_rows() -> int:
            layout.open()
            return sum(decoded(layout.read_row(row)) for row in order)

        batches = shuffled_batches(states, shuffled_gb, batch_tokens)

        def read_batches() -> int:
            layout.open()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return sum(decoded(layout.read_batch(batch, pool)) for batch in batches)

        facts["shuffled"] = median([cold(layout, read_rows) for _ in range(repeats)])
        facts["batched"] = median([cold(layout, read_batches) for _ in range(repeats)])
    layout.remove()
    return facts


def cold(layout: Layout, work: Callable[[], int]) -> dict[str, float]:
    """Timed with an empty page cache."""
    layout.forget()
    return timed(work)


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """The run of median speed."""
    return sorted(runs, key=lambda run: run["gb_s"])[len(runs) // 2]


def shuffled_rows(states: States, most_gb: float) -> list[int]:
    """Rows in a random order, each once, until so many decoded bytes are reached."""
    order, taken = [], 0
    for row in np.random.default_rng(1).permutation(len(states.lengths)).tolist():
        order.append(row)
        taken += states.lengths[row] * states.bytes_per_token
        if taken >= most_gb * 1e9:
            break
    return order


def shuffled_batches(states: States, most_gb: float, batch_tokens: int) -> list[tuple[int, ...]]:
    """Rows as the trainer packs them, each once at most, up to so many decoded bytes."""
    batches, most = [], min(most_gb * 1e9 / states.bytes_per_token, states.tokens)
    for batch in packed_rows(states.lengths, batch_tokens, seed=1):
        if sum(states.lengths[row] for taken in [*batches, batch] for row in taken) > most:
            break
        batches.append(batch)
    return batches


def compare(case: str, states: States, args: argparse.Namespace, batch_tokens: int) -> None:
    """Measure all layouts of one source of states."""
    with TemporaryDirectory(dir=args.folder, prefix="store-read-") as name:
        folder = Path(name) / "states"
        shard = args.shard_tokens
        layouts: list[tuple[str, Callable[[], Layout]]] = [
            ("plain", lambda: Plain(folder, states)),
            *(
                ("bfloat16", lambda chunk=chunk: Ours(folder, states, "bfloat16", chunk, shard))
                for chunk in args.chunk_tokens
            ),
            ("float8", lambda: Ours(folder, states, "float8", args.chunk_tokens[0], shard)),
            ("safetensors", lambda: SafetensorsRows(folder, states)),
            ("torch", lambda: TorchRows(folder, states)),
            ("npy", lambda: Npy(folder, states)),
        ]
        found = {}
        for kind, make in layouts:
            if kind not in args.layouts:
                continue
            layout = make()
            found[layout.name] = measure(layout, args.shuffled_gb, batch_tokens, args.repeats)
            print(layout.name, found[layout.name], flush=True)
    first = found[f"eagle3 bfloat16, chunks of {args.chunk_tokens[0]}"]
    lengths = np.array(states.lengths)
    facts = {
        "states": states.name,
        "tokens": states.tokens,
        "rows": len(lengths),
        "row_tokens_mean": round(float(lengths.mean()), 1),
        "decoded_gb": round(states.tokens * states.bytes_per_token / 1e9, 2),
        "shard_tokens": shard,
        "batch_tokens": batch_tokens,
        "threads_of_torch": torch.get_num_threads(),
        "layouts": found,
        "sequential_over_plain": over(first, found[Plain.name], "sequential"),
        "shuffled_over_safetensors": over(first, found[SafetensorsRows.name], "shuffled"),
        "shuffled_over_torch": over(first, found.get(TorchRows.name), "shuffled"),
        "batched_over_safetensors": over(first, found[SafetensorsRows.name], "batched"),
        "cores_for_one_h200": round(H200_GB_S / first["batched"]["per_core"], 2),
    }
    keep("store_read", case, facts)


def over(ours: dict[str, Any], theirs: dict[str, Any] | None, reading: str) -> float | None:
    """Our speed over theirs, if they were measured."""
    return theirs and round(ours[reading]["gb_s"] / theirs[reading]["gb_s"], 3)


def main() -> None:
    """Compare on the demo's states, on many copies of them, and on synthetic ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="A bfloat16 store of the demo.")
    parser.add_argument("--synthetic-gb", type=float, required=True, help="Decoded; 0 for none.")
    parser.add_argument("--longest", type=int, default=2000, help="Tokens of a synthetic row.")
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--shard-tokens", type=int, default=8192)
    parser.add_argument("--shuffled-gb", type=float, default=6.0)
    parser.add_argument(
        "--repeats", type=int, default=3, help="Of each reading; the median counts."
    )
    kinds = ("plain", "bfloat16", "float8", "safetensors", "torch", "npy")
    parser.add_argument("--layouts", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="On the disk to measure.")
    args = parser.parse_args()
    compare("smollm2", real_states(args.store), args, DEMO_BATCH_TOKENS)
    if args.synthetic_gb:
        states = kimi_shaped(args.synthetic_gb, args.longest)
        compare("kimi-shaped", states, args, KIMI_BATCH_TOKENS)


if __name__ == "__main__":
    main()
