"""A program that is killed while a corpus is made with capture: at the n-th touch of those states.

It loads everything once, and forks for every run: one in a folder that is never killed, then for
each kill a run that is killed and one that goes on after it.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from toy_store import DISK_EVENTS

from eagle3.artifacts import Corpus, TargetModel
from eagle3.config import load_params
from eagle3.corpus.build import build_corpus
from eagle3.corpus.capture import AnswerCapture
from eagle3.engines.base import Sampling
from eagle3.engines.transformers import TransformersEngine
from eagle3.progress import SilentReporter
from eagle3.target import bring_target

WHOLE = "whole"


def run(project: Path, touch: int | None) -> int:
    """Make the corpus in a child that kills itself at its `touch`-th event; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    touches = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal touches
        if event in DISK_EVENTS and "captured-" in str(args[0]):
            touches += 1
            if touches == touch:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    os.chdir(project)
    params = load_params()
    target = TargetModel.load(TargetModel.home)
    engine = TransformersEngine(target, params.target)
    capture = AnswerCapture(target, engine, params.extract, params.corpus.max_length)
    build_corpus(target, params.corpus, engine, Corpus.home, SilentReporter(), capture)
    os._exit(0)


def main(folder: Path, *touches: int) -> None:
    """A project per kill beside the whole one; params.yaml lies in `folder`."""
    torch.set_num_threads(1)
    os.chdir(folder)
    params = load_params()
    target = bring_target(params.target, TargetModel.home)
    # Loads what transformers loads late, once for all children; Zarr's thread would not outlive a
    # fork, so nothing is written here.
    TransformersEngine(target, params.target).generate([[1]], Sampling(0.0, 1.0, 2, 0))
    for name in (WHOLE, *map(str, touches)):
        project = folder / name
        shutil.copytree(folder / "data", project / "data")
        shutil.copy(folder / "params.yaml", project)
        if name != WHOLE:
            status = run(project, int(name))
            assert os.WIFSIGNALED(status), f"it ended before touch {name}"
            assert not (project / Corpus.home).exists()
        assert os.WEXITSTATUS(run(project, None)) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
