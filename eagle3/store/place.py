"""Where the files of a store lie: one interface to a folder and to a bucket (eagle3.store.bucket).

A file is named by its path within the store, such as `aux/c.7.0.0.0`. Nothing of a store is ever
changed in its place, so a file is written whole or not at all, and read in parts.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from eagle3.artifacts import file_sha256
from eagle3.errors import StoreError
from eagle3.work import fsync_folder


class Place(Protocol):
    """The files of one store, wherever they lie. Threads may share one.

    Reading a file that is not there raises FileNotFoundError.
    """

    readers: int
    """Threads that are worth reading with at a time."""

    def __str__(self) -> str:
        """Path or URL, for people."""

    def file(self, name: str) -> str:
        """Path or URL of a file, for people."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that is whole, by name."""

    def read(self, name: str) -> bytes:
        """All of a file."""

    def tail(self, name: str, length: int) -> bytes:
        """The last bytes of a file; fewer if it is shorter."""

    def read_into(self, name: str, offset: int, room: memoryview) -> None:
        """Fill `room` from an offset on.

        Raises:
            ValueError: the file ends before.
        """

    def sha256(self, name: str) -> str:
        """Hash of all of a file, kept nowhere."""

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Write a file; it is there, whole and durable, when the `with` has ended without error."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_unfinished(self) -> None:
        """Remove what `create` had begun when it was killed; nobody may be writing."""

    def make(self, build: Callable[[Path], None], last: str) -> None:
        """Make the store of the files that `build` puts into a folder; `last` is there last."""

    def folder(self, name: str) -> AbstractContextManager[Path]:
        """A folder of the store as one on the disk, while the `with` lasts."""


class Folder:
    """A store on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Decompression leaves Python to the others: a core for each chunk of a range.
        self.readers = os.cpu_count() or 1

    def __str__(self) -> str:
        return str(self.path)

    def file(self, name: str) -> str:
        """Its path."""
        return str(self.path / name)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file, as the file system has them."""
        return {
            path.relative_to(self.path).as_posix(): path.stat().st_size
            for path in self.path.rglob("*")
            if path.suffix != ".partial" and path.is_file()
        }

    def read(self, name: str) -> bytes:
        """All of a file."""
        return (self.path / name).read_bytes()

    def tail(self, name: str, length: int) -> bytes:
        """The last bytes of a file."""
        with (self.path / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), length, max(0, size - length))

    def read_into(self, name: str, offset: int, room: memoryview) -> None:
        """Fill `room` by one system call."""
        # Not by `open`, which takes longer than the reading of a short row.
        file = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.preadv(file, [room], offset) != len(room):
                raise ValueError(f"it ends before byte {offset + len(room)}")
        finally:
            os.close(file)

    def sha256(self, name: str) -> str:
        """Hash of all of a file."""
        return file_sha256(self.path / name)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write beside the place and rename into it."""
        path = self.path / name
        # A worker taken for dead may still be at it: until the end each process has its own file.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        fsync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove files that are named as unfinished."""
        for partial in self.path.rglob("*.partial"):
            partial.unlink()

    def make(self, build: Callable[[Path], None], last: str) -> None:
        """Build beside the place and rename the whole folder, so that in its place it is whole.

        Raises:
            StoreError: something else is in the place.
        """
        if self.path.exists():
            raise StoreError(
                f"{self.path} holds no hidden states; remove it, then run `dvc repro extract`"
            )
        new = self.path.with_name(f".{self.path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        build(new)
        assert (new / last).is_file(), last
        for path in sorted(new.rglob("*")):
            fsync_folder(path) if path.is_dir() else _make_durable(path)
        new.replace(self.path)
        fsync_folder(self.path.parent)

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """The folder itself."""
        yield self.path / name


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync_folder(path.parent)
