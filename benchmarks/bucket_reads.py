"""How training asks for its states: reads, bytes and time a batch, where the store is in a bucket.

PROJECT is a finished demo, with its states in a bucket or on the disk. Times say nothing of a real
bucket when the server is on this machine; counts and bytes hold anywhere.

    python benchmarks/bucket_reads.py --project PROJECT --batches 20
"""

import argparse
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np

from eagle3.artifacts import Corpus, HiddenStates
from eagle3.batches import packed_rows
from eagle3.config import load_params
from eagle3.store.pointer import Pointer, place_of
from eagle3.store.rows import load_rows
from eagle3.store.states import StateStore


def counting(kind: type) -> type:
    """That kind of place, which notes the bytes of every read of a shard."""

    class Counting(kind):
        def __init__(self, where: object) -> None:
            super().__init__(where)
            self.chunks: list[int] = []
            self.indices: list[int] = []

        def read_into(self, name: str, offset: int, room: memoryview) -> None:
            self.chunks.append(len(room))
            super().read_into(name, offset, room)

        def tail(self, name: str, length: int) -> bytes:
            self.indices.append(length)
            return super().tail(name, length)

    return Counting


def main() -> None:
    """Read batches as the trainer would, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    os.chdir(args.project)
    params, rows = load_params().train, load_rows(Corpus.home / "train.zarr")
    folder = HiddenStates.home / "train.zarr"
    pointer = Pointer.find(folder)
    where = pointer.url if pointer else folder
    place = counting(type(place_of(where)))(where)
    store = StateStore.at(place)
    lengths = np.diff(rows.offsets_R1).tolist()
    plan = packed_rows(lengths, params.batch_tokens, params.seed)
    started, tokens = time.monotonic(), 0
    for which in islice(plan, args.batches):
        for row in which:
            span = rows.span(row)
            if store.refused.at(span) is None:
                tokens += len(store.read(span.start, span.stop)[1])
    seconds = time.monotonic() - started
    facts = {
        "store": str(place),
        "tokens_a_row": rows.num_tokens / len(rows),
        "chunk_tokens": store.header.chunk_tokens,
        "batches": args.batches,
        "tokens_a_batch": tokens / args.batches,
        "reads_a_batch": len(place.chunks) / args.batches,
        "bytes_a_read": sum(place.chunks) / len(place.chunks),
        "bytes_a_token": sum(place.chunks) / tokens,
        "reads_of_indices": len(place.indices),
        "seconds_a_batch": seconds / args.batches,
        "load": os.getloadavg()[0],
    }
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
