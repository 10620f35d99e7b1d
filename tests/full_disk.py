"""Extraction on file systems that are too small: run by a test in a mount namespace of its own.

For every size, the whole extraction runs on a new tmpfs of that size until the disk is full; the
tmpfs is then enlarged, extraction goes on, and its files are compared with those of one that had
room. Prints one JSON object.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from toy_store import WIDTH, Silent, ToyEngine, toy_rows

from eagle3.artifacts import SPLITS, Corpus, TargetModel
from eagle3.config import ExtractParams
from eagle3.errors import DiskFullError
from eagle3.extract import extract_hidden_states
from eagle3.store.rows import Rows, rows_sha256, save_rows

OUT = Path("hidden_states")
ROOMY = "size=8m"
PARAMS = ExtractParams(
    backend="transformers",
    state_dtype="bfloat16",
    eval_state_dtype="float32",
    chunk_tokens=4,
    shard_tokens=16,
    store=None,
    max_nonfinite_rows=0,
    workers=1,
    ray_address=None,
    keep=True,
    ahead_shards=1,
    capture_answers=False,
)
TARGET = TargetModel(
    made_from={},
    source="toy",
    revision="",
    weights_sha256="",
    files_sha256="",
    weights_folder="",
    architecture="",
    num_layers=8,
    hidden_size=WIDTH,
    vocab_size=320,
    tied=False,
    aux_layers=(2, 4, 5),
    trust_remote_code=False,
)


def make_corpus(rows: Rows) -> Corpus:
    """The same rows in every split, in the current folder."""
    for split in SPLITS:
        save_rows(rows, Corpus.home / f"{split}.zarr")
    return Corpus(
        made_from={"target": TARGET.fingerprint},
        tokens=dict.fromkeys(SPLITS, rows.num_tokens),
        supervised_tokens=dict.fromkeys(SPLITS, rows.num_tokens),
        rows=dict.fromkeys(SPLITS, len(rows)),
        sha256=dict.fromkeys(SPLITS, rows_sha256(rows)),
        counts={},
    )


def extract(corpus: Corpus) -> dict[str, bytes]:
    """Extract in the current folder; the files."""
    extract_hidden_states(TARGET, corpus, PARAMS, ToyEngine(), OUT, Silent())
    return {
        str(path.relative_to(OUT)): path.read_bytes() for path in OUT.rglob("*") if path.is_file()
    }


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def on_a_small_disk(folder: Path, kib: int, corpus: Corpus, whole: dict[str, bytes]) -> Any:
    """What happened on a disk of so many KiB; None if there was room for all."""
    folder.mkdir()
    mount(folder, f"size={kib}k")
    os.chdir(folder)
    # Only what extraction writes is on the small disk.
    Path("data").symlink_to("../data")
    message = ""
    try:
        extract(corpus)
    except DiskFullError as error:
        message = str(error)
    done = len(list(Path(".work").rglob("shards/*.json")))
    begun = any(Path(".work").rglob("zarr.json"))
    mount(folder, f"remount,{ROOMY}")
    equal = extract(corpus) == whole
    left = sorted(path.name for path in folder.iterdir())
    os.chdir(folder.parent)
    facts = {"kib": kib, "message": message, "shards": done, "begun": begun}
    return {**facts, "equal": equal, "left": left} if message else None


def main(folder: Path, first: int, step: int) -> None:
    """Try disks of `first` KiB, then `step` more each, until one has room."""
    os.chdir(folder)
    corpus = make_corpus(toy_rows())
    whole = extract(corpus)
    stops = []
    kib = first
    while stop := on_a_small_disk(folder / f"{kib:04d}k", kib, corpus, whole):
        stops.append(stop)
        kib += step
    sys.stdout.write(json.dumps(stops) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
