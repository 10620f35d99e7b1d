"""Kill extraction at random instants, go on, and compare with one that was never killed.

    python benchmarks/kill_extraction.py --kills 200

Each store is made by the real extraction (a tiny random Llama in transformers, the three splits) in
a process of its own, which gets SIGKILL after a random time, one to four times; then it runs to its
end, and every file must be that of the reference, byte for byte. The instants are drawn from a
seed; where they fall depends on the machine. A kill counts if the process was still running.

The processes are forked from one that has loaded everything, so that a kill falls into extraction
and not into minutes of imports.
"""

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from store_results import keep
from tiny_target import save_tiny_target

from eagle3.artifacts import SPLITS, Corpus, TargetModel
from eagle3.config import ExtractParams
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.store.rows import Rows, rows_sha256, save_rows
from eagle3.target import bring_target

OUT = Path("hidden_states")
PARAMS = ExtractParams(
    backend="transformers",
    state_dtype="bfloat16",
    eval_state_dtype="float32",
    chunk_tokens=32,
    shard_tokens=64,
    store=None,
    max_nonfinite_rows=0,
    workers=1,
    ray_address=None,
    keep=True,
    ahead_shards=1,
    capture_answers=False,
)
ROWS = {"train": 30, "validation": 6, "eval": 6}
SHORTEST, LONGEST = 5, 60


class Silent(ConsoleReporter):
    """Nothing to say 200 times."""

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        """Say nothing."""


class Bench:
    """The target, loaded, and a corpus that all extractions share."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, np.random.default_rng(seed)
        params = save_tiny_target(folder / "tiny")
        os.chdir(folder)
        self.target = bring_target(params, TargetModel.home)
        self.engine = TransformersEngine(self.target, params)
        self.rows = {split: self._rows(count) for split, count in ROWS.items()}
        self.corpus = Corpus(
            made_from={"target": self.target.fingerprint},
            tokens={split: self.rows[split].num_tokens for split in SPLITS},
            supervised_tokens={split: self.rows[split].num_tokens for split in SPLITS},
            rows={split: len(self.rows[split]) for split in SPLITS},
            sha256={split: rows_sha256(self.rows[split]) for split in SPLITS},
            counts={},
        )
        self.shards = sum(-(-rows.num_tokens // PARAMS.shard_tokens) for rows in self.rows.values())
        # Zarr starts threads, which a fork does not take along: it is used in children alone.
        finish(self._save_corpus)

    def extract_in(self, name: str) -> Callable[[], None]:
        """Extraction into a folder of its own, from where a killed one left it."""
        place = self.folder / name

        def extract() -> None:
            place.mkdir(exist_ok=True)
            os.chdir(place)
            data = Path("data")
            if not data.is_symlink():
                data.symlink_to("../data")
            extract_hidden_states(self.target, self.corpus, PARAMS, self.engine, OUT, Silent())

        return extract

    def files(self, name: str) -> dict[str, bytes]:
        """Everything that an extraction has published."""
        out = self.folder / name / OUT
        return {
            str(path.relative_to(out)): path.read_bytes()
            for path in out.rglob("*")
            if path.is_file()
        }

    def state(self, name: str) -> tuple[int, str]:
        """Finished shards, and where in its work an extraction was killed."""
        place = self.folder / name
        if (place / OUT / "manifest.json").is_file():
            return self.shards, "after the result was in its place"
        done = len(list(place.rglob("shards/[0-9]*.json")))
        if any(place.rglob("*.partial")):
            return done, "while a file was being written"
        if done == self.shards:
            return done, "after the last shard"
        # A shard's aux is written first, its marker last.
        if len(list(place.rglob("aux/c.*"))) > done:
            return done, "between the data of a shard and its marker"
        return done, "between shards" if done else "before the first shard"

    def _rows(self, count: int) -> Rows:
        lengths = self.draw.integers(SHORTEST, LONGEST + 1, size=count)
        tokens = int(lengths.sum())
        return Rows(
            tokens_N=self.draw.integers(3, 320, size=tokens).astype(np.int32),
            loss_mask_N=np.ones(tokens, np.bool_),
            offsets_R1=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            domains=("chat",) * count,
            row_ids=tuple(f"row{row}" for row in range(count)),
        )

    def _save_corpus(self) -> None:
        for split, rows in self.rows.items():
            save_rows(rows, Corpus.home / f"{split}.zarr")


def start(work: Callable[[], None]) -> int:
    """Do some work in a child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def finish(work: Callable[[], None]) -> float:
    """Do some work in a child to its end; the seconds it took."""
    started = time.monotonic()
    _, status = os.waitpid(start(work), 0)
    assert status == 0, f"a child ended with {status}"
    return time.monotonic() - started


def kill_after(seconds: float, work: Callable[[], None]) -> bool:
    """Do some work in a child and kill it; False if it was done by then."""
    child = start(work)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, f"a child ended with {status}"
        return False
    return True


def differing(store: dict[str, bytes], reference: dict[str, bytes]) -> list[str]:
    """Files that are not the same in both, or are in one alone."""
    names = sorted(store.keys() | reference.keys())
    return [name for name in names if store.get(name) != reference.get(name)]


def run(bench: Bench, kills: int, kept: Path) -> dict[str, object]:
    """Make stores until so many kills have fallen; what was found. Unequal ones go to `kept`."""
    whole_s = finish(bench.extract_in("reference"))
    reference = bench.files("reference")
    found: Counter[str] = Counter()
    fallen, stores, too_late = 0, 0, 0
    unequal: dict[str, list[str]] = {}
    while fallen < kills:
        name = f"store{stores:04d}"
        stores += 1
        for _ in range(int(bench.draw.integers(1, 5))):
            done = bench.state(name)[0]
            seconds = bench.draw.uniform(0, whole_s * (1.02 - done / bench.shards))
            if not kill_after(seconds, bench.extract_in(name)):
                too_late += 1
                break
            fallen += 1
            found[bench.state(name)[1]] += 1
        finish(bench.extract_in(name))
        if differs := differing(bench.files(name), reference):
            unequal[name] = differs
            for each in (name, "reference"):
                shutil.copytree(bench.folder / each / OUT, kept / each, dirs_exist_ok=True)
        if stores % 10 == 0:
            print(f"{fallen} kills, {stores} stores, {len(unequal)} unequal", file=sys.stderr)
    return {
        "kills": fallen,
        "too_late": too_late,
        "stores": stores,
        "equal": stores - len(unequal),
        "unequal": unequal,
        "shards_of_a_store": bench.shards,
        "seconds_of_an_extraction": round(whole_s, 2),
        "killed": dict(found.most_common()),
    }


def main() -> None:
    """Kill, compare, print; exit 1 if a store differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=Path("unequal"), help="for unequal stores")
    args = parser.parse_args()
    # A forked child has none of its parent's threads.
    torch.set_num_threads(1)
    home, kept = Path.cwd(), args.kept.resolve()
    with TemporaryDirectory(prefix="kill-extraction-") as name:
        facts = run(Bench(Path(name), args.seed), args.kills, kept)
        os.chdir(home)
    keep("kill_extraction", f"{args.kills} kills, seed {args.seed}", facts)
    if facts["unequal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
