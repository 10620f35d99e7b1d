"""Who trains together: this process leads, and starts helpers on its machine that end with it.

A helper is the same command with RANK set, as torchrun sets it, so that torchrun can start all of
them as well. It ignores SIGTERM and Ctrl-C: while it lives, the leader's collectives come to
their end, and the leader can write its state. When the leader ends, the kernel ends the helper.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eagle3.config import TrainParams, VocabSize
from eagle3.device import pick_device
from eagle3.errors import ParamsError, TrainingError
from eagle3.team import ALONE, MEETING_PLACE, Team, joined
from tasks.signals import end_with_parent

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_NOTICE = 120.0
"""gloo tells a leader at once that a helper is lost, and it writes its state. NCCL does not: the
leader waits inside a GPU call, where no signal is heard."""
SECONDS_TO_DIE = 5.0
"""Between a helper's connections and its exit code."""


@contextmanager
def training_team(params: TrainParams, size: VocabSize) -> Iterator[Team]:
    """Give the team that trains a drafter of this size: alone, or this process with the others.

    Raises:
        ParamsError: torchrun started another number of processes than params.yaml says.
        TrainingError: a helper ended before the work did.
    """
    world = os.environ.get("WORLD_SIZE")
    if params.processes == 1 and world in (None, "1"):
        yield ALONE
        return
    device = pick_device(params.device, "train.device")
    if world is not None:
        if int(world) != params.processes:
            raise ParamsError(
                f"torchrun started {world} processes, but train.processes is {params.processes}; "
                f"set it to {world}, or run `python -m flows.train {size}` without torchrun"
            )
        with joined(device, os.environ) as team:
            yield team
        return
    # All are on this machine: gloo need not ask which of its addresses others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory(prefix="eagle3-team-") as folder:
        shared = {"WORLD_SIZE": str(params.processes), MEETING_PLACE: f"file://{folder}/met"}
        mine = os.environ | shared | {"RANK": "0", "LOCAL_RANK": "0"}
        with _helpers(params.processes, size, shared), joined(device, mine) as team:
            yield team


@dataclass(frozen=True)
class Helpers:
    """The processes that this one started."""

    processes: dict[int, subprocess.Popen[bytes]]

    def lost(self, patience: float = 0.0) -> str:
        """Say which of them ended too early; nothing if none does within `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            for rank, process in self.processes.items():
                if code := process.poll():
                    return (
                        f"training process {rank} of {len(self.processes) + 1} ended with exit "
                        f"code {code}; what it said is above. Run the same command to go on from "
                        "the last training state"
                    )
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.1)


@contextmanager
def _helpers(count: int, size: VocabSize, shared: dict[str, str]) -> Iterator[None]:
    """Run processes 1 to `count` - 1 as long as the block."""
    command = [sys.executable, "-m", "flows.train", str(size)]
    helpers = Helpers({})
    over = threading.Event()
    watcher = threading.Thread(target=_end_when_one_is_lost, args=(helpers, over), daemon=True)
    try:
        for rank in range(1, count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            helpers.processes[rank] = subprocess.Popen(
                command,
                env=os.environ | shared | own,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        watcher.start()
        yield
    except RuntimeError as error:
        # Perhaps a broken connection, in torch's words.
        if lost := helpers.lost(patience=SECONDS_TO_DIE):
            raise TrainingError(lost) from error
        raise
    finally:
        over.set()
        for process in helpers.processes.values():
            process.kill()
            process.wait()


def _end_when_one_is_lost(helpers: Helpers, over: threading.Event) -> None:
    while not over.wait(SECONDS_BETWEEN_LOOKS):
        if lost := helpers.lost():
            if not over.wait(SECONDS_TO_NOTICE):
                log.error("error: %s", lost)
                os._exit(1)
            return
