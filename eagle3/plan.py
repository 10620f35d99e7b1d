"""What a training run will take, before anything runs: disk, GPU memory and time.

One row of figures for each draft vocabulary of params.yaml. Bytes: eagle3/footprint.py; time:
eagle3/throughput.py. What nobody has measured is None, with the reason.
"""

from dataclasses import dataclass
from pathlib import Path

from eagle3.config import Params, VocabSize
from eagle3.counts import parameter_table
from eagle3.drafter import DraftShape
from eagle3.errors import ParamsError
from eagle3.footprint import (
    Network,
    Work,
    drafter_bytes,
    hot_peak,
    plain_memory,
    state_bytes,
    training_state_bytes,
)
from eagle3.store.ratio import EXPECTED_RATIO
from eagle3.throughput import RESULTS, rate


@dataclass(frozen=True)
class States:
    """Hidden states of the training split; every draft vocabulary reads the same."""

    raw_bytes: int
    bytes: int
    """The most that lies on disk at a time."""
    basis: str


@dataclass(frozen=True)
class Memory:
    """Of each GPU."""

    parts: dict[str, int]
    """Bytes."""
    missing: str
    """What is not among the parts; empty if nothing is."""

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Time:
    """With every token supervised; prompts cost less."""

    tokens_per_s: float
    seconds_per_epoch: float
    seconds_in_all: float
    """For `train.total_steps`."""
    basis: str


@dataclass(frozen=True)
class SizePlan:
    """One draft vocabulary."""

    size: VocabSize
    draft_vocab: int
    trainable: int
    drafter_bytes: int
    training_state_bytes: int
    work_bytes: int
    """The most that .work/ holds: best drafter and state, the next of each while it is written, and
    `train.keep_checkpoints` drafters."""
    memory: Memory
    time: Time | None
    no_time: str
    """Why there is none; empty if there is."""


@dataclass(frozen=True)
class Plan:
    """A run over so many training tokens, on so many GPUs."""

    tokens: int
    gpus: int
    states: States
    steps_per_epoch: float
    sizes: tuple[SizePlan, ...]


def plan_training(params: Params, tokens: int, gpus: int, results: Path = RESULTS) -> Plan:
    """Work out what training on `tokens` tokens takes; nothing is allocated.

    Raises:
        ParamsError: a step's micro-batches cannot be shared by so many GPUs.
    """
    train = params.train
    if train.accumulate % gpus:
        raise ParamsError(
            f"--gpus {gpus} cannot share train.accumulate ({train.accumulate}) micro-batches; "
            f"set train.accumulate to a multiple of {gpus}"
        )
    steps = tokens / (train.batch_tokens * train.accumulate)
    states = _states(params, tokens, one_epoch=train.total_steps <= steps)
    sizes = tuple(_size_plan(params, size, tokens, gpus, results) for size in params.vocab.sizes)
    return Plan(tokens, gpus, states, steps, sizes)


def _states(params: Params, tokens: int, one_epoch: bool) -> States:
    extract, width = params.extract, params.target.shape.hidden_size
    raw, stored = state_bytes(width, tokens, extract.state_dtype)
    basis = (
        f"four {extract.state_dtype} states a token, at {EXPECTED_RATIO[extract.state_dtype]} of "
        "their size: a little above what was measured on SmolLM2-135M; another model's may pack "
        "otherwise"
    )
    if extract.keep:
        return States(raw, stored, basis)
    if not one_epoch:
        basis += "; with extract.keep false, too, all lie on disk until the last epoch reads them"
        return States(raw, stored, basis)
    # The shards ahead, and a row that lies across two.
    shards = extract.ahead_shards + 2
    _, window = state_bytes(width, shards * extract.shard_tokens, extract.state_dtype)
    basis += f"; with extract.keep false, one epoch has at most {shards} shards on disk at a time"
    return States(raw, min(stored, window), basis)


def _size_plan(params: Params, size: VocabSize, tokens: int, gpus: int, results: Path) -> SizePlan:
    table = parameter_table(params, size)
    target = params.target.shape
    shape = DraftShape.of(params.drafter, target.hidden_size, target.vocab_size, table.draft_vocab)
    drafter = drafter_bytes(table, target.vocab_size)
    state = training_state_bytes(table)
    hot = params.train.dtype == "bfloat16" and params.train.device != "cpu"
    trained = Network.of(table).head_trained
    time, no_time = _time(params, shape, trained, tokens, gpus, results) if hot else (None, _PLAIN)
    return SizePlan(
        size=size,
        draft_vocab=table.draft_vocab,
        trainable=table.trainable,
        drafter_bytes=drafter,
        training_state_bytes=state,
        work_bytes=2 * (drafter + state) + params.train.keep_checkpoints * drafter,
        memory=_memory(params, size, shape, gpus, hot),
        time=time,
        no_time=no_time,
    )


_PLAIN = (
    "measured for train.dtype bfloat16 on a GPU alone, and params.yaml has another dtype or device"
)


def _memory(params: Params, size: VocabSize, shape: DraftShape, gpus: int, hot: bool) -> Memory:
    table, train = parameter_table(params, size), params.train
    sharers = gpus if train.sharding == "full" else 1
    if hot:
        share = train.accumulate // gpus
        work = Work(
            train.batch_tokens,
            train.ttt_steps,
            share,
            held=2 * share,
            recompute=train.recompute,
            head_products=train.head_products,
            sharers=sharers,
        )
        return Memory(hot_peak(table, shape, work), "")
    return Memory(plain_memory(table, train.dtype, sharers), f"states and logits: {_PLAIN}")


def _time(
    params: Params, shape: DraftShape, trained: bool, tokens: int, gpus: int, results: Path
) -> tuple[Time | None, str]:
    train = params.train
    work = (train.batch_tokens, train.ttt_steps)
    found = rate(shape, *work, trained, train.recompute, results, train.head_products)
    if found is None:
        return None, f"{results} is not here or has no record of eagle3; run this in the project"
    basis = found.basis
    if gpus > 1:
        basis += f"; {gpus} GPUs taken as {gpus} times one (two were measured at 1.93 times)"
    together = found.tokens_per_s * gpus
    in_all = train.total_steps * train.accumulate * train.batch_tokens
    return Time(together, tokens / together, in_all / together, basis), ""
