"""Where the stores of one extraction lie: in the result's folder, or in a bucket it points to."""

from collections.abc import Callable, Mapping
from pathlib import Path

from eagle3.store.layout import Header
from eagle3.store.pointer import Pointer, Where
from eagle3.store.rows import Rows
from eagle3.store.size import StoreSizes
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter


class StoreHomes:
    """The stores of one extraction, by name (`train.zarr`)."""

    def __init__(self, folder: Path, bucket: str | None, headers: Mapping[str, Header]) -> None:
        """`bucket` is extract.store; without one the stores are in `folder`, which exists."""
        self._folder, self._bucket, self._headers = folder, bucket, headers
        self.sizes = StoreSizes(folder, headers)

    def require_room(self) -> None:
        """Say what the stores will take, before anything of them is written.

        Raises:
            DiskFullError: they go to the disk, which has less.
        """
        if self._bucket is None:
            self.sizes.require_room()
        else:
            self.sizes.say(f"in {self._bucket}")

    @property
    def to_come(self) -> Callable[[], int] | None:
        """What will tell how many bytes the disk must still take; None if it takes none."""
        return self.sizes.to_come if self._bucket is None else None

    def start(self, name: str, rows: Rows) -> StateWriter:
        """Start a store, or go on with it.

        Raises:
            StoreError: what is there was made from something else, or is damaged.
            StorageError: the bucket cannot be reached.
        """
        writer = StateWriter(self._where(name), self._headers[name], rows)
        if self._bucket is not None:
            if Pointer.find(self._folder / name) is None:
                # Not begun by this work: finished, and to be made again, or begun elsewhere.
                writer.remove_damaged()
            self._point(name, sha256="")
        return writer

    def finish(self, name: str) -> StateStore:
        """Open a store of which all shards are done."""
        store = StateStore.open(self._where(name))
        if self._bucket is not None:
            self._point(name, store.sha256)
        return store

    def _where(self, name: str) -> Where:
        if self._bucket is None:
            return self._folder / name
        # A name that no other states have: none is ever overwritten by another corpus or target.
        path = Path(name)
        return f"{self._bucket}/{path.stem}-{self._headers[name].fingerprint[:16]}{path.suffix}"

    def _point(self, name: str, sha256: str) -> None:
        fingerprint = self._headers[name].fingerprint
        pointer = Pointer(url=str(self._where(name)), fingerprint=fingerprint, sha256=sha256)
        pointer.save(self._folder / name)
