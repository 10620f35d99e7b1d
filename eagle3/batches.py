"""What the trainer is fed: whole rows packed up to a number of tokens, read one batch ahead.

The order is a function of the seed alone, so a resumed run continues where it stopped by counting,
with any number of processes: each takes its share of a step's micro-batches.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import numpy as np
import torch

from eagle3.attention import Documents
from eagle3.replay import StateReader
from eagle3.store.rows import Rows
from eagle3.team import ALONE, Team
from eagle3.ttt import Batch


def packed_rows(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield row numbers batch by batch, without end: every epoch is a new permutation.

    A batch takes rows while they fit into `batch_tokens`; a row longer than that is a batch alone.
    Batches run on across epochs, so none is a small remainder.
    """
    packed: list[int] = []
    tokens = 0
    for epoch in count():
        for row in np.random.default_rng((seed, epoch)).permutation(len(lengths)).tolist():
            if packed and tokens + lengths[row] > batch_tokens:
                yield tuple(packed)
                packed, tokens = [], 0
            packed.append(row)
            tokens += lengths[row]


def read_batch(rows: Rows, read: StateReader, which: Sequence[int], device: torch.device) -> Batch:
    """Read whole rows, lay them end to end and bring them to the device, states as stored."""
    spans = [rows.span(row) for row in which]
    states = [read(span.start, span.stop) for span in spans]
    bounds = np.cumsum([0, *(span.stop - span.start for span in spans)])
    tokens_N = np.concatenate([rows.tokens_N[span] for span in spans]).astype(np.int64)
    loss_mask_N = np.concatenate([rows.loss_mask_N[span] for span in spans])
    return Batch(
        tokens_N=torch.from_numpy(tokens_N).to(device),
        loss_mask_N=torch.from_numpy(loss_mask_N).to(device),
        aux_N3H=torch.cat([aux for aux, _ in states]).to(device, non_blocking=True),
        last_NH=torch.cat([last for _, last in states]).to(device, non_blocking=True),
        documents=Documents(tuple(bounds.tolist())),
    )


def training_steps(
    rows: Rows,
    read: StateReader,
    *,
    batch_tokens: int,
    accumulate: int,
    seed: int,
    skip: int,
    stop: int | None = None,
    device: torch.device,
    team: Team = ALONE,
) -> Iterator[list[Batch]]:
    """Yield this process's micro-batches of each optimizer step, from step `skip` on.

    They are read one step ahead, but nothing of step `stop` or later is.
    """
    lengths = np.diff(rows.offsets_R1).tolist()
    end = None if stop is None else stop * accumulate
    plan = islice(packed_rows(lengths, batch_tokens, seed), skip * accumulate, end)

    def read_step() -> list[Batch]:
        step = list(islice(plan, accumulate))
        return [read_batch(rows, read, which, device) for which in team.share(step)]

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as reader:
        ahead: Future[list[Batch]] = reader.submit(read_step)
        while True:
            batches = ahead.result()
            ahead = reader.submit(read_step)
            yield batches
