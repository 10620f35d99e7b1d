"""A store as objects of a bucket: its files are the objects under a URL. The only user of s3fs.

An object is put as a whole by one request (above 100 MiB by several, of which the last makes it
appear), so none is ever half there, and nothing is renamed. It is read by ranges.

Credentials and server are those of AWS's own variables and files (AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL, ~/.aws/...). They are neither read nor written here.
"""

import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.errors import StorageError

SCHEME = "s3://"
HASHED_AT_A_TIME = 32 * 2**20

CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE and ~/.aws/credentials"


class EndsBeforeError(Exception):
    """The server has no byte of the range that was asked for."""


class Bucket:
    """The objects under a URL. Threads may share one."""

    # A request waits for its first byte far longer than a core works on what it brings.
    readers = 16

    def __init__(self, url: str) -> None:
        """Nothing is asked of the server yet.

        Raises:
            StorageError: s3fs is not installed, or the URL names no bucket and prefix.
        """
        self.url = url.rstrip("/")
        self._root = self.url.removeprefix(SCHEME)
        self._bucket, _, prefix = self._root.partition("/")
        if not self._bucket or not prefix:
            raise StorageError(f"{url} names no store; write s3://BUCKET/PREFIX/train-....zarr")
        # What other processes have put since must be seen, also by a new server of a test.
        self._files: Any = _import_s3fs(url).S3FileSystem(
            use_listings_cache=False, skip_instance_cache=True
        )

    def __str__(self) -> str:
        return self.url

    def file(self, name: str) -> str:
        """Its URL."""
        return f"{self.url}/{name}"

    def sizes(self) -> dict[str, int]:
        """Bytes of every object, by one request for each thousand."""
        with self._asked():
            found = self._files.find(self._root, detail=True)
        return {path.removeprefix(f"{self._root}/"): facts["size"] for path, facts in found.items()}

    def read(self, name: str) -> bytes:
        """All of an object."""
        # Without a start, s3fs would ask for the size first.
        return self._from(name, 0, None)

    def tail(self, name: str, length: int) -> bytes:
        """The last bytes of an object."""
        with self._asked(name):
            return bytes(self._files.cat_file(self._key(name), start=-length))

    def read_into(self, name: str, offset: int, room: memoryview) -> None:
        """Fill `room` by one request."""
        found = self._from(name, offset, offset + len(room))
        if len(found) != len(room):
            raise ValueError(f"it ends before byte {offset + len(room)}")
        room[:] = found

    def sha256(self, name: str) -> str:
        """Hash of an object, some of it in memory at a time."""
        digest, offset = hashlib.sha256(), 0
        while piece := self._from(name, offset, offset + HASHED_AT_A_TIME):
            digest.update(piece)
            offset += len(piece)
            if offset % HASHED_AT_A_TIME:
                break
        return digest.hexdigest()

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Gather the content in memory and put it when it is complete."""
        content = io.BytesIO()
        yield content
        with self._asked(name):
            self._files.pipe_file(self._key(name), content.getvalue())

    def remove(self, name: str) -> None:
        """Remove an object; the server says the same where there is none."""
        with self._asked(name):
            self._files.rm_file(self._key(name))

    def remove_unfinished(self) -> None:
        """Nothing: an object that was not put to its end is not there."""

    def make(self, build: Callable[[Path], None], last: str) -> None:
        """Put what `build` makes, object by object."""
        with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
            build(Path(folder))
            paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
            names = [path.relative_to(folder).as_posix() for path in paths]
            for name in sorted(names, key=lambda name: (name == last, name)):
                with self._asked(name):
                    self._files.pipe_file(self._key(name), (Path(folder) / name).read_bytes())

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """A copy, removed when the `with` ends."""
        with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
            for found in self.sizes():
                if found.startswith(f"{name}/"):
                    path = Path(folder) / found
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self.read(found))
            yield Path(folder) / name

    def _from(self, name: str, start: int, stop: int | None) -> bytes:
        """What an object has of a range, which may reach beyond its end."""
        try:
            with self._asked(name):
                return bytes(self._files.cat_file(self._key(name), start=start, end=stop))
        except EndsBeforeError:
            return b""

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _asked(self, name: str = "") -> Iterator[None]:
        """Say what to mend when server or network refuse; a missing object stays as it is.

        Raises:
            StorageError: no such bucket, no or wrong credentials, or no server.
        """
        # s3fs brings botocore.
        from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

        place = self.file(name) if name else self.url
        try:
            yield
        except FileNotFoundError as error:
            if not _says(error, "NoSuchBucket"):
                raise
            raise StorageError(
                f"{place} cannot be reached: there is no bucket {self._bucket}; make it "
                f"(`aws s3 mb s3://{self._bucket}`), or mend extract.store"
            ) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StorageError(
                f"{place} cannot be reached: {error}; give credentials by {CREDENTIALS}"
            ) from error
        except PermissionError as error:
            raise StorageError(
                f"{place} is refused: {error}; give credentials that may list, read, write and "
                f"delete there, by {CREDENTIALS}"
            ) from error
        except (OSError, BotoCoreError) as error:
            if _says(error, "InvalidRange"):
                raise EndsBeforeError from error
            raise StorageError(
                f"{place} cannot be reached: {error}; look at the network, and at AWS_ENDPOINT_URL "
                "if the bucket is not AWS's"
            ) from error


def _says(error: Exception, code: str) -> bool:
    """Whether the server's own code is behind an error of s3fs."""
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") == code


def _import_s3fs(url: str) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise StorageError(
            f"{url} needs s3fs, which is not installed; run `pip install 'eagle3[s3]'`, or set "
            "extract.store to null"
        ) from error
    return s3fs
