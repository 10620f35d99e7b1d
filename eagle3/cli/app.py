"""The commands together, and what becomes of an error that a user can mend."""

import sys
from collections.abc import Sequence

import typer

from eagle3.cli.check import check
from eagle3.cli.clean import clean
from eagle3.cli.doctor import doctor
from eagle3.cli.engine import engine_app
from eagle3.cli.export import export
from eagle3.cli.importer import import_
from eagle3.cli.inspect import inspect
from eagle3.cli.measure import measure
from eagle3.cli.output import log_to_stderr
from eagle3.cli.params import params
from eagle3.cli.plan import plan
from eagle3.cli.report import report
from eagle3.cli.store import store_app
from eagle3.errors import Eagle3Error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # A traceback with every local variable in it is for nobody.
    pretty_exceptions_enable=False,
    help="Train EAGLE-3 drafters and measure what they are worth.",
)
app.callback()(log_to_stderr)
for command in (params, plan, inspect, report, check, export, measure, clean, doctor):
    app.command()(command)
app.command("import")(import_)
app.add_typer(store_app, name="store")
app.add_typer(engine_app, name="engine")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process.

    `arguments` are those after the program's name; by default the process's own.
    """
    try:
        app(args=arguments, prog_name="eagle3")
    except Eagle3Error as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
