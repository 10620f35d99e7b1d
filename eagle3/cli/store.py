"""`eagle3 store`: size, integrity and content of a hidden-state store."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from eagle3.cli.output import JsonFlag, answer
from eagle3.errors import StoreError

if TYPE_CHECKING:
    from eagle3.store.refused import RefusedRows
    from eagle3.store.states import StateStore

store_app = typer.Typer(no_args_is_help=True, help="Look into a hidden-state store.")
StorePath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A store: data/hidden_states/train.zarr, or s3://bucket/prefix/...zarr.",
    ),
]

# zarr and torch are loaded late: they take seconds that the other commands need not wait for.


@store_app.command()
def info(where: StorePath, json: JsonFlag = False) -> None:
    """Say how much a store holds, how well it is packed, and whose states it has.

    Example: eagle3 store info data/hidden_states/train.zarr
    """
    facts = asdict(_open(where).info)
    table = Table(title=where, show_header=False)
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value}")
    answer(facts, json, table)


@store_app.command()
def verify(where: StorePath, json: JsonFlag = False) -> None:
    """Compare every byte with the checksums that were written; exit 1 if anything differs.

    Rows that were refused, since a state of theirs was no number, are named; they are no fault.

    Example: eagle3 store verify data/hidden_states/train.zarr
    """
    faults, refused = _faults(where)
    table = Table(title=f"{where}: {len(faults)} fault(s)")
    for column in ("shard", "file", "what", "tokens", "rows"):
        table.add_column(column, overflow="fold")
    for fault in faults:
        table.add_row(*("all" if value is None else str(value) for value in fault.values()))
    whole = "\n".join([f"{where} is whole", *(f"without {row}" for row in refused)])
    facts = {"ok": not faults, "faults": faults, "refused": [row.model_dump() for row in refused]}
    answer(facts, json, table if faults else whole)
    if faults:
        raise typer.Exit(1)


@store_app.command()
def sample(
    where: StorePath,
    row: Annotated[int, typer.Option(min=0, help="Which row, from 0.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="How many of its tokens.")] = 8,
    json: JsonFlag = False,
) -> None:
    """Show the first tokens of a row: id, whether supervised, and the size of each state.

    The size is the root mean square: it should differ from layer to layer and never be 0.

    Example: eagle3 store sample data/hidden_states/train.zarr --row 3
    """
    facts = _sample(where, row, tokens)
    table = Table(title=f"row {facts['row_id']} ({facts['domain']}), {facts['tokens']} tokens")
    for column in ("position", "token", "supervised", "low", "middle", "high", "last"):
        table.add_column(column, justify="right")
    for at in facts["sample"]:
        sizes = (f"{size:.3f}" for size in at["rms"])
        table.add_row(str(at["position"]), str(at["token"]), str(at["supervised"]), *sizes)
    answer(facts, json, table)


def _open(where: str) -> "StateStore":
    from eagle3.store.states import StateStore

    return StateStore.open(where)


def _faults(where: str) -> tuple[list[dict[str, Any]], "RefusedRows"]:
    from eagle3.store.refused import RefusedRows
    from eagle3.store.states import StateStore

    try:
        store = _open(where)
        found = store.verify()
    except StoreError as error:
        if not StateStore.is_at(where):
            raise
        # A store, but so damaged or unfinished that it does not open: the answer is no.
        what: dict[str, Any] = {
            "shard": None,
            "file": "",
            "what": str(error),
            "tokens": [],
            "rows": [],
        }
        return [what], RefusedRows()
    faults = [
        {
            "shard": fault.shard,
            "file": fault.file,
            "what": fault.what,
            "tokens": [fault.tokens.start, fault.tokens.stop],
            "rows": list(fault.rows),
        }
        for fault in found
    ]
    return faults, store.refused


def _sample(where: str, row: int, tokens: int) -> dict[str, Any]:
    store = _open(where)
    rows = store.rows
    if row >= len(rows):
        raise StoreError(f"{where} has rows 0 to {len(rows) - 1}; --row {row} is not one of them")
    span = rows.span(row)
    stop = min(span.stop, span.start + tokens)
    aux_n3H, last_nH = store.read(span.start, stop)
    aux_rms_n3 = aux_n3H.float().square().mean(dim=-1).sqrt()
    last_rms_n = last_nH.float().square().mean(dim=-1).sqrt()
    return {
        "row": row,
        "row_id": rows.row_ids[row],
        "domain": rows.domains[row],
        "tokens": span.stop - span.start,
        "sample": [
            {
                "position": index,
                "token": int(rows.tokens_N[span.start + index]),
                "supervised": bool(rows.loss_mask_N[span.start + index]),
                "rms": [*aux_rms_n3[index].tolist(), last_rms_n[index].item()],
            }
            for index in range(stop - span.start)
        ],
    }
