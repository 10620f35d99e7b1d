"""`eagle3 measure`: a drafter in a server that somebody else runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from eagle3.artifacts import TargetModel
from eagle3.cli.output import JsonFlag, answer
from eagle3.config import load_params
from eagle3.progress import ConsoleReporter


def measure(
    url: Annotated[str, typer.Argument(help="The server with the drafter: http://host:port.")],
    engine: Annotated[
        Literal["vllm", "sglang"], typer.Option(help="What serves there. SGLang: chains only.")
    ],
    plain_url: Annotated[
        str | None,
        typer.Option(help="A server of the target alone: gives speedup and losslessness."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for serving.json.")] = Path("reports/measured"),
    json: JsonFlag = False,
) -> None:
    """Let a running server answer the eval split; report acceptance by its own counters.

    Prompts, temperatures and batch sizes are those of `serve` in params.yaml; k is the server's.

    Example: eagle3 measure http://127.0.0.1:30000 --engine sglang
    """
    # Here, since it needs torch, and `eagle3 --help` should not wait for it.
    from eagle3.serve_url import measure_running

    target = TargetModel.load(TargetModel.home)
    params = load_params().serve
    figures = measure_running(engine, url, plain_url, target, params, out, ConsoleReporter())
    table = Table(title=f"{engine} at {url}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    answer({"url": url, "out": str(out), "metrics": figures}, json, table)
