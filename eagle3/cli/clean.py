"""`eagle3 clean`: remove unfinished work that no stage can go on from."""

import shutil
from typing import Annotated

import typer

from eagle3.cli.output import JsonFlag, answer
from eagle3.config import load_params
from eagle3.leftovers import WorkFolder, work_folders


def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    json: JsonFlag = False,
) -> None:
    """Remove folders of .work/ whose inputs or params are no longer those at hand.

    Example: eagle3 clean --yes
    """
    folders = work_folders(load_params())
    removable = [folder for folder in folders if folder.unusable]
    kept = [folder for folder in folders if not folder.unusable]
    for folder in removable:
        typer.echo(f"{folder.folder} ({_size(folder)}): {folder.unusable}", err=True)
    if removable and not yes:
        typer.confirm(f"Remove {len(removable)} folder(s)?", abort=True, err=True)
    for folder in removable:
        shutil.rmtree(folder.folder)
    freed = sum(folder.bytes for folder in removable)
    facts = {
        "removed": [str(folder.folder) for folder in removable],
        "kept": [str(folder.folder) for folder in kept],
        "bytes": freed,
    }
    answer(
        facts,
        json,
        f"freed {freed:,} bytes: removed {len(removable)} folder(s), kept {len(kept)} in use",
    )


def _size(folder: WorkFolder) -> str:
    return f"{folder.bytes / 2**20:,.1f} MiB"
