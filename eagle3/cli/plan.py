"""`eagle3 plan`: disk, GPU memory and time of a training run, before it runs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from eagle3.cli.output import JsonFlag, answer
from eagle3.cli.params import params_file
from eagle3.config import Sharding, load_params

if TYPE_CHECKING:
    from eagle3.plan import Plan, SizePlan

GIB = 2**30


def plan(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training split.")],
    preset: Annotated[
        str | None, typer.Option(help="Name of a file in presets/; without it, params.yaml.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that share a step; by default train.processes.")
    ] = None,
    sharding: Annotated[
        Sharding | None,
        typer.Option(help="Whole weights on every GPU, or parts; by default train.sharding."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Say what training will take, for each draft vocabulary side by side; nothing is allocated.

    Example: eagle3 plan --preset kimi-k2.5 --tokens 17300000
    """
    # Here, since it needs torch, and `eagle3 --help` should not wait for it.
    from eagle3.plan import plan_training

    path = params_file(preset)
    params = load_params(path)
    if sharding is not None:
        train = params.train.model_copy(update={"sharding": sharding})
        params = params.model_copy(update={"train": train})
    made = plan_training(params, tokens, gpus or params.train.processes)
    title = f"Training as in {path}: {tokens:,} tokens, {made.gpus} GPU(s)"
    facts = {"params": str(path), **asdict(made), "sizes": [_facts(size) for size in made.sizes]}
    answer(facts, json, _for_people(made, title), *_sources(made))


def _facts(size: "SizePlan") -> dict[str, Any]:
    memory = {"bytes": size.memory.bytes, "gib": size.memory.bytes / GIB}
    return {**asdict(size), "memory": {**memory, **asdict(size.memory)}}


def _for_people(made: "Plan", title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for size in made.sizes:
        full = f"full ({size.draft_vocab:,})"
        table.add_column(full if size.size == "full" else f"{size.draft_vocab:,}", justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *(cells if len(cells) > 1 else cells * len(made.sizes)))

    row("trainable parameters", *(f"{size.trainable:,}" for size in made.sizes))
    table.add_section()
    row("disk: hidden states, read by all", _gib(made.states.bytes))
    row("disk: drafter", *(_gib(size.drafter_bytes) for size in made.sizes))
    row("disk: training state", *(_gib(size.training_state_bytes) for size in made.sizes))
    row("disk: .work/ at most", *(_gib(size.work_bytes) for size in made.sizes))
    table.add_section()
    # The fullest moment of one may not be that of another.
    for part in dict.fromkeys(part for size in made.sizes for part in size.memory.parts):
        row(f"memory: {part}", *(_gib(size.memory.parts.get(part, 0)) for size in made.sizes))
    row("memory: in all" + _at_least(made), *(_gib(size.memory.bytes) for size in made.sizes))
    table.add_section()
    row("optimizer steps an epoch", f"{made.steps_per_epoch:,.0f}")
    row("tokens a second", *(_rate(size) for size in made.sizes))
    row("time an epoch", *(_epoch(size) for size in made.sizes))
    row("time for train.total_steps", *(_in_all(size) for size in made.sizes))
    return table


def _sources(made: "Plan") -> list[Text]:
    lines = [f"Hidden states: {made.states.basis}."]
    for size in made.sizes:
        name = f"{size.draft_vocab:,}"
        lines.append(f"Time, {name}: {size.time.basis if size.time else size.no_time}.")
        if size.memory.missing:
            lines.append(f"Memory, {name}: not counted are {size.memory.missing}.")
    lines.append(
        "Memory is each GPU's. Every token is taken as supervised: prompts make both less. "
        "CUDA's context, torch's cache and NCCL come on top of memory; answers, extraction and "
        "validation on top of time."
    )
    return [Text(line) for line in lines]


def _at_least(made: "Plan") -> str:
    return ", at least" if any(size.memory.missing for size in made.sizes) else ""


def _gib(count: int) -> str:
    if count >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / 2**20:,.1f} MiB"


def _rate(size: "SizePlan") -> str:
    return f"{size.time.tokens_per_s:,.0f}" if size.time else "not known"


def _epoch(size: "SizePlan") -> str:
    return _duration(size.time.seconds_per_epoch) if size.time else "not known"


def _in_all(size: "SizePlan") -> str:
    return _duration(size.time.seconds_in_all) if size.time else "not known"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
