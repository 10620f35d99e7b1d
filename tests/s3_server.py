"""An S3 server on a free port of 127.0.0.1, and the variables by which it is found."""

import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "AKIATESTONLY0000TEST", "a-secret-that-must-be-nowhere"


@contextmanager
def s3_server() -> Iterator[None]:
    """Run moto's; skips the test where it or s3fs is not installed."""
    server = pytest.importorskip("moto.server", reason="`make setup` installs moto")
    pytest.importorskip("s3fs", reason="pip install 'eagle3[s3]' runs these tests")
    local = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    local.start()
    host, port = local.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # Nothing of whoever runs the tests, nor of the machine they run on.
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.delenv("AWS_PROFILE", raising=False)
        yield
    local.stop()


class TestBucket:
    """The bucket `states` of the server, looked at past our own code."""

    __test__ = False

    def __init__(self) -> None:
        """Made empty."""
        import s3fs

        self.files: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        # One process's servers share what they hold.
        if self.files.exists("states"):
            self.files.rm("states", recursive=True)
        self.files.mkdir("states")
        self._before: dict[str, bytes] = {}

    def content(self, store: str) -> dict[str, bytes]:
        """Every object under s3://states/STORE, by name."""
        root = f"states/{store}"
        return {
            name.removeprefix(f"{root}/"): self.files.cat_file(name)
            for name in self.files.find(root)
        }

    def change(self, name: str, content: bytes | None) -> None:
        """Put another content into an object, or remove it, until `restore`."""
        if name not in self._before:
            self._before[name] = self.files.cat_file(f"states/{name}")
        if content is None:
            self.files.rm_file(f"states/{name}")
        else:
            self.files.pipe_file(f"states/{name}", content)

    def flip(self, name: str) -> None:
        """Change one bit of an object, until `restore`."""
        content = bytearray(self.files.cat_file(f"states/{name}"))
        content[len(content) // 3] ^= 1
        self.change(name, bytes(content))

    def restore(self) -> None:
        """Put back what was changed and removed."""
        for name, content in self._before.items():
            self.files.pipe_file(f"states/{name}", content)
        self._before.clear()


class Requests(logging.Handler):
    """What the server was asked for, as `METHOD name` of objects of the bucket `states`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []
        self.killed_by: dict[str, subprocess.Popen[bytes]] = {}
        """Processes that are killed when a request is answered."""

    def emit(self, record: logging.LogRecord) -> None:
        # The line may be in colours.
        if found := re.search(r"([A-Z]+) /states/?(\S*) HTTP", record.getMessage()):
            self.seen.append(f"{found[1]} {found[2]}")
            if victim := self.killed_by.get(self.seen[-1]):
                victim.kill()

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator["Requests"]:
        log, requests = logging.getLogger("werkzeug"), cls()
        level = log.level
        log.addHandler(requests)
        log.setLevel(logging.INFO)
        yield requests
        log.removeHandler(requests)
        log.setLevel(level)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
