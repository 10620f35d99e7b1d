"""What stands for a store that lies in a bucket: `remote.json`, in a folder of the store's name.

DVC versions this small file in the place of terabytes, and its hashes say when they are others.
"""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from eagle3.artifacts import write_atomically
from eagle3.errors import StoreError
from eagle3.store.bucket import SCHEME, Bucket
from eagle3.store.place import Folder, Place

POINTER = "remote.json"

Where = Path | str
"""A store's folder, or the URL of one in a bucket."""


class Pointer(BaseModel):
    """Where a store lies, and which it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    fingerprint: str
    """Of the store's header: what it was made from."""
    sha256: str
    """Of all its seals; empty until the store is finished."""

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Read the pointer of a folder; None if the folder has none.

        Raises:
            StoreError: there is one that cannot be read.
        """
        try:
            return cls.model_validate_json((folder / POINTER).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(
                f"{folder / POINTER} names no store; run `dvc repro --force extract`"
            ) from error

    def save(self, folder: Path) -> None:
        """Write the pointer, alone in the folder."""
        write_atomically(folder / POINTER, self.model_dump_json(indent=2) + "\n")

    def require(self, folder: Path, fingerprint: str, sha256: str) -> None:
        """Refuse another store than the one that was meant.

        Raises:
            StoreError: the store at the URL is another.
        """
        if (self.fingerprint, self.sha256) != (fingerprint, sha256):
            raise StoreError(
                f"{self.url} holds other hidden states (fingerprint {fingerprint[:12]}, sha256 "
                f"{sha256[:12]}) than {folder / POINTER} names ({self.fingerprint[:12]}, "
                f"{self.sha256[:12] or 'unfinished'}); run `dvc repro --force extract`"
            )


def place_of(where: Where) -> Place:
    """The place by its path or URL; nothing is looked for there yet.

    Raises:
        StorageError: s3fs is not installed, or the URL names no bucket and prefix.
    """
    return Bucket(str(where)) if is_url(where) else Folder(Path(where))


def is_url(where: Where) -> bool:
    """Whether that is a store in a bucket. A Path never is: it would say s3:/bucket."""
    return isinstance(where, str) and where.startswith(SCHEME)
