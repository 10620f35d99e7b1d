"""What the trainer is fed: whole rows packed up to a number of tokens, read one batch ahead.

The order is a function of the seed alone, so a resumed run continues where it stopped by counting,
with any number of processes: each takes its share of a step's micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count, islice

import numpy as np
import torch
from torch import Tensor

from eagle3.attention import Documents
from eagle3.store.refused import RowsRead
from eagle3.store.rows import Rows
from eagle3.team import ALONE, Team
from eagle3.ttt import Batch

RowsReader = Callable[[Sequence[slice]], RowsRead]
"""Reads whole rows of a store, by their tokens."""


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


def read_batch(rows: Rows, read: RowsReader, which: Sequence[int], device: torch.device) -> Batch:
    """Read whole rows, lay them end to end and bring them to the device, states as stored.

    A row that was refused keeps its place, with no supervised token: so batches and their sharing
    among processes are the same whatever is refused, and no document attends to another's tokens.
    """
    spans = [rows.span(row) for row in which]
    aux_N3H, last_NH, refused = read(spans)
    bounds = np.cumsum([0, *(span.stop - span.start for span in spans)])
    tokens_N = np.concatenate([rows.tokens_N[span] for span in spans]).astype(np.int64)
    loss_mask_N = np.concatenate([rows.loss_mask_N[span] for span in spans])
    for place in refused:
        loss_mask_N[bounds[place] : bounds[place + 1]] = False
    return Batch(
        tokens_N=_bring(torch.from_numpy(tokens_N), device),
        loss_mask_N=_bring(torch.from_numpy(loss_mask_N), device),
        aux_N3H=_bring(aux_N3H, device),
        last_NH=_bring(last_NH, device),
        documents=Documents(tuple(bounds.tolist())),
    )


def training_steps(
    rows: Rows,
    read: RowsReader,
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

    They are read one step ahead, but nothing of step `stop` or later is; a GPU gets them on a
    stream of their own, while it computes.
    """
    lengths = np.diff(rows.offsets_R1).tolist()
    end = None if stop is None else stop * accumulate
    plan = islice(packed_rows(lengths, batch_tokens, seed), skip * accumulate, end)
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read_step() -> list[Batch]:
        step = list(islice(plan, accumulate))
        with torch.cuda.stream(copies) if copies else nullcontext():
            batches = [read_batch(rows, read, which, device) for which in team.share(step)]
        if copies:
            copies.synchronize()
        return batches

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as reader:
        ahead: Future[list[Batch]] = reader.submit(read_step)
        while True:
            batches = ahead.result()
            ahead = reader.submit(read_step)
            if copies:
                _hand_over(batches, torch.cuda.current_stream(device))
            yield batches


def _bring(values: Tensor, device: torch.device) -> Tensor:
    # Only out of pinned memory does a copy leave the processor to others.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _hand_over(batches: list[Batch], stream: torch.cuda.Stream) -> None:
    """Tell the allocator who uses the tensors now, so that it gives their memory to nobody else."""
    for batch in batches:
        for tensor in (batch.tokens_N, batch.loss_mask_N, batch.aux_N3H, batch.last_NH):
            tensor.record_stream(stream)
