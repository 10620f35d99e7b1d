"""Under what name a file is written until it is whole, and what killed writers left there."""

import glob
import os
from pathlib import Path

SUFFIX = ".partial"


def unfinished(path: Path) -> Path:
    """A name beside `path` for this process to write to, and then to rename.

    A process that is killed between the two leaves its file, which would be part of the result for
    ever: `benchmarks/kill_extraction.py` found one. So the next writer of the
    same file removes those of processes that have ended.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{SUFFIX}"):
        writer = left.name.removesuffix(SUFFIX).rpartition(".")[2]
        if writer.isdecimal() and not _runs(int(writer)):
            left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs, for somebody else.
        return True
    return True
