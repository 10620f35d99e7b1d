"""`eagle3 engine`: one vLLM server for all stages of a project that want one."""

from typing import Any

import typer
from rich.table import Table

from eagle3.cli.output import JsonFlag, answer
from eagle3.config import load_params

engine_app = typer.Typer(
    no_args_is_help=True,
    help="Keep a vLLM server for the stages with `backend: vllm`; otherwise each starts its own.",
)

# The engines need torch, and `eagle3 --help` should not wait for it.


@engine_app.command()
def start(json: JsonFlag = False) -> None:
    """Start the server for params.yaml and data/target, and return when it answers.

    It listens on 127.0.0.1 and stays until `eagle3 engine stop`. Stages find it by .engine/.

    Example: eagle3 engine start
    """
    from eagle3.artifacts import TargetModel
    from eagle3.engines.keep_running import start_shared

    server = start_shared(TargetModel.load(TargetModel.home), load_params())
    _say(server.model_dump(mode="json"), json)


@engine_app.command()
def stop(json: JsonFlag = False) -> None:
    """End the server and its children; exit 1 if none runs.

    Example: eagle3 engine stop
    """
    from eagle3.engines.keep_running import stop_shared

    stopped = stop_shared()
    answer({"ok": stopped}, json, "stopped" if stopped else "no server runs for this project")
    if not stopped:
        raise typer.Exit(1)


@engine_app.command()
def status(json: JsonFlag = False) -> None:
    """Say which server runs for this project, and for what; exit 1 if none does.

    Example: eagle3 engine status
    """
    from eagle3.engines.shared import running

    server = running()
    if server is None:
        answer({"ok": False}, json, "no server runs for this project")
        raise typer.Exit(1)
    _say(server.model_dump(mode="json"), json)


def _say(server: dict[str, Any], json: bool) -> None:
    facts = {"ok": True, "url": server["url"], "pid": server["pid"], **server["is_for"]}
    table = Table(title="a server runs", show_header=False)
    for name, value in facts.items():
        if name != "ok":
            table.add_row(name, f"{value}")
    answer(facts, json, table)
