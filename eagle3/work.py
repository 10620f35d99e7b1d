"""Where long stages work until done: `.work/<stage>-<fingerprint>/`, renamed to the result.

DVC deletes a stage's outs before it runs the stage, so unfinished work lives elsewhere. The
fingerprint covers inputs and params: a killed stage finds its own work again, and work on
anything else starts clean.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.artifacts import fingerprint_of, write_atomically
from eagle3.errors import DiskFullError

WORK = Path(".work")
NOTE = "made-of.json"
"""In every work folder: the stage and what it works from, for `eagle3 clean` to compare."""


def workspace(stage: str, made_of: dict[str, Any]) -> Path:
    """The folder for work on `stage` with exactly these inputs and params; made if missing."""
    folder = WORK / f"{stage.replace('@', '-')}-{fingerprint_of(made_of)[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    note = {"stage": stage, "made_of": made_of}
    write_atomically(folder / NOTE, json.dumps(note, default=str, indent=2) + "\n")
    return folder


def publish(work: Path, out: Path) -> None:
    """Put finished work in the place of the result, by renames alone."""
    (work / NOTE).unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    old = out.with_name(f".{out.name}.old")
    if out.exists():
        out.replace(old)
    work.replace(out)
    if old.exists():
        shutil.rmtree(old)


@contextmanager
def room_for(what: str, folder: Path, to_come: Callable[[], int] | None = None) -> Iterator[None]:
    """Turn "no space left" into an error that names the folder and says that work is kept.

    `to_come` are the bytes that are still to be written, where somebody can tell.

    Raises:
        DiskFullError: the disk under `folder` is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        found = f"{free / 2**20:.1f} MiB free"
        if to_come is not None:
            needed = to_come()
            found += f", about {needed / 2**20:.1f} MiB to come: make room for at least "
            found += f"{max(0, needed - free) / 2**20:.1f} MiB more"
        raise DiskFullError(
            f"no room for {what} in {folder} ({found}); make room, then run "
            "the same command again: what is finished is kept and goes on from there"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
