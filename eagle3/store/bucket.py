"""Shards in object storage: the states of a store lie at a URL, everything else of it here.

The folder keeps header, rows and markers, all small, and `remote.json` with the URL. The bucket has
the whole store, so that it can be read without the folder, too. Nothing is renamed there: a shard's
data is put first and its marker last; without the marker the shard is not there.

Credentials and endpoint are those of AWS's own variables and files (AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL, ~/.aws/...). They are neither read nor written here.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from zarr.storage import FsspecStore

from eagle3.artifacts import write_atomically
from eagle3.errors import StoreError

REMOTE = "remote.json"
READ_BYTES = 8 * 2**20


class Remote(BaseModel):
    """Where the shards of a store lie, if not in its folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str


class Bucket:
    """The objects under a URL, named by their paths within the store. Threads may share one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = url.removeprefix("s3://")

    @classmethod
    def of(cls, store: Path) -> "Bucket | None":
        """Where the shards of the store in a folder lie; None for in the folder."""
        try:
            return cls(Remote.model_validate_json((store / REMOTE).read_text()).url)
        except FileNotFoundError:
            return None

    def note(self, store: Path) -> None:
        """Say in a store's folder that its shards are here."""
        write_atomically(store / REMOTE, Remote(url=self.url).model_dump_json(indent=2) + "\n")

    def put(self, store: Path, name: str) -> None:
        """Copy a file of the store's folder here."""
        with self.reached():
            self._files.put_file(str(store / name), f"{self._root}/{name}")

    def sizes(self) -> dict[str, int]:
        """Bytes of every object."""
        with self.reached():
            found = self._files.find(self._root, detail=True)
        return {path.removeprefix(f"{self._root}/"): facts["size"] for path, facts in found.items()}

    def has(self, name: str) -> bool:
        """Whether there is an object of this name."""
        with self.reached():
            return bool(self._files.exists(f"{self._root}/{name}"))

    def sha256(self, name: str) -> str:
        """Hash of an object, read once and kept nowhere."""
        digest = hashlib.sha256()
        with self.reached(), self._files.open(f"{self._root}/{name}", "rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def zarr_store(self, name: str) -> FsspecStore:
        """What zarr reads an array of the store from, chunk by chunk."""
        with self.reached():
            return FsspecStore.from_url(f"{self.url}/{name}", read_only=True)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Turn what storage and network refuse into an error that says what to set.

        Raises:
            StoreError: no such bucket, no credentials, no network, or no s3fs.
        """
        _import_s3fs(self.url)
        from botocore.exceptions import BotoCoreError

        try:
            yield
        except (OSError, BotoCoreError) as error:
            raise StoreError(
                f"{self.url} cannot be used: {error}; make the bucket, give credentials by "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials, and another "
                "server than AWS by AWS_ENDPOINT_URL"
            ) from error

    @cached_property
    def _files(self) -> Any:
        # What other workers have put since must be seen.
        return _import_s3fs(self.url).S3FileSystem(use_listings_cache=False)


def _import_s3fs(url: str) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise StoreError(
            f"{url} needs s3fs, which is not installed; run `pip install 'eagle3[s3]'`, or set "
            "extract.store to null"
        ) from error
    return s3fs
