"""The vLLM server that the stages of a project share, and how a stage finds it.

`.engine/` of the project has its record, its log and a lock file, which the server's processes hold
open and locked: a record whose lock is free is of a server that has ended.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3.artifacts import TargetModel
from eagle3.engines.server import INSIDE_VLLM
from eagle3.engines.vllm_server import extracted_layers
from eagle3.errors import EngineError

SHARED = Path(".engine")
RECORD, LOCK, LOG, STATES = "server.json", "lock", "vllm.log", "states"


@dataclass(frozen=True)
class Wanted:
    """What a stage needs a server to be, or a server is."""

    target: str
    """The fingerprint of the target's record."""
    dtype: str
    layers: tuple[int, ...]
    """Whose states it can give."""
    max_length: int
    """Tokens of the longest prompt and its answer together."""
    code: str
    """Hash of what we load into vLLM."""

    @classmethod
    def of(cls, target: TargetModel, dtype: str, max_length: int) -> "Wanted":
        """For this target, with the code at hand."""
        layers = tuple(extracted_layers(target))
        return cls(target.fingerprint, dtype, layers, max_length, code_loaded())


class SharedServer(BaseModel):
    """The record of a server that runs, or ran."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    """The process that leads the server's group."""
    url: str
    is_for: Wanted


def find_shared(wanted: Wanted, folder: Path = SHARED) -> SharedServer | None:
    """The server that runs for this project; None if there is none.

    Raises:
        EngineError: it runs for another target or with other settings, or is being started.
    """
    server = running(folder)
    if server is None:
        return None
    wrong = list(_differences(server.is_for, wanted))
    if wrong:
        raise EngineError(
            f"the server of {folder / RECORD} has {'; '.join(wrong)}; run `eagle3 engine stop`, "
            "and `eagle3 engine start` for one that fits"
        )
    return server


def _differences(found: Wanted, wanted: Wanted) -> Iterator[str]:
    """What a server is, where it is not as wanted; a text may be shorter than its longest."""
    if found.target != wanted.target:
        yield "another target"
    if found.code != wanted.code:
        yield "other code of ours in eagle3/engines/inside_vllm"
    if found.dtype != wanted.dtype:
        yield f"dtype {found.dtype}, not {wanted.dtype}"
    if found.layers != wanted.layers:
        yield f"states of layers {found.layers}, not {wanted.layers}"
    if found.max_length < wanted.max_length:
        yield f"room for {found.max_length} tokens, not {wanted.max_length}"


def running(folder: Path = SHARED) -> SharedServer | None:
    """The record of the server that runs for this project; None if none does.

    Raises:
        EngineError: one is being started.
    """
    if not is_held(folder / LOCK):
        return None
    try:
        return SharedServer.model_validate_json((folder / RECORD).read_text())
    except (FileNotFoundError, ValidationError) as error:
        raise EngineError(
            f"{folder} is held by a server that does not answer yet; wait until `eagle3 engine "
            "start` has ended, then run the same command again"
        ) from error


def is_held(lock: Path) -> bool:
    """Whether some process holds the lock."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@cache
def code_loaded() -> str:
    """Hash of the files that vLLM loads of ours."""
    files = sorted(INSIDE_VLLM.glob("*.py"))
    content = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)
    return hashlib.sha256(content).hexdigest()
