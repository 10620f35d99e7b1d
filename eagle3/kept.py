"""Drafters that a run keeps: the best by replay, and the newest few for trying in an engine.

    best/                      config.json and model.safetensors
    checkpoints/step-0000500/  likewise, for the newest `train.keep_checkpoints` validations

The training state is another thing (checkpoint.py): there is one, replaced as a whole.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from eagle3.work import publish

BEST = "best"
NEWEST = "checkpoints"


def keep_drafter(
    folder: Path, step: int, write: Callable[[Path], None], *, best: bool, newest: int
) -> None:
    """Keep the drafter of a step as the best, as one of the `newest`, as both or not at all.

    `write` puts it into a folder. Drafters older than the newest are removed.
    """
    if not best and not newest:
        return
    partial = folder / "drafter.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write(partial)
    if newest:
        place = folder / NEWEST / f"step-{step:07d}"
        # It may be there: a killed run comes by again.
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        if best:
            shutil.copytree(partial, place)
        else:
            partial.replace(place)
        for old in sorted(place.parent.iterdir())[:-newest]:
            shutil.rmtree(old)
    if best:
        publish(partial, folder / BEST)
