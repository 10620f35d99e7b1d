"""What stores of hidden states will take, known before they are written, and whether it fits."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from eagle3.errors import DiskFullError
from eagle3.store.layout import Header, is_done
from eagle3.store.place import Folder
from eagle3.store.ratio import EXPECTED_RATIO

log = logging.getLogger(__name__)


class StoreSizes:
    """The stores of one extraction, finished, begun or not there yet."""

    def __init__(self, folder: Path, headers: Mapping[str, Header]) -> None:
        """`headers` by the store's name in `folder`, which exists."""
        self.folder, self._headers = folder, headers

    @property
    def tokens(self) -> int:
        """Tokens of all stores."""
        return sum(header.tokens for header in self._headers.values())

    @property
    def raw_bytes(self) -> int:
        """Bytes of all states as a reader gets them."""
        return sum(header.raw_bytes for header in self._headers.values())

    def to_come(self) -> int:
        """Bytes that the shards which are not finished are expected to take."""
        return sum(
            round(expected_bytes(header) * _share_missing(self.folder / name, header))
            for name, header in self._headers.items()
        )

    def require_room(self) -> None:
        """Say what the stores will take on the disk, before anything of them is written.

        Raises:
            DiskFullError: the disk has less.
        """
        to_come, free = self.to_come(), shutil.disk_usage(self.folder).free
        self.say(f"of which about {in_mib(to_come)} are still to be written; {in_mib(free)} free")
        if to_come > free:
            raise DiskFullError(
                f"hidden states of {self.tokens} tokens need about {in_mib(to_come)} in "
                f"{self.folder}, which has {in_mib(free)} free: {in_mib(to_come - free)} are "
                "missing; make room, or set extract.state_dtype to a smaller one (float8 takes "
                "about two thirds of bfloat16), then run `dvc repro extract`"
            )

    def say(self, more: str) -> None:
        """Log what the stores will take, and `more`."""
        log.info(
            "hidden states of %d tokens: %s as they are, about %s at rest, %s",
            self.tokens,
            in_mib(self.raw_bytes),
            in_mib(sum(map(expected_bytes, self._headers.values()))),
            more,
        )


def expected_bytes(header: Header) -> int:
    """Bytes at rest of a whole store."""
    return round(header.raw_bytes * EXPECTED_RATIO[header.dtype])


def in_mib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.1f} MiB"


def _share_missing(path: Path, header: Header) -> float:
    place = Folder(path)
    sizes, shards = place.sizes(), range(header.num_shards)
    spans = (header.span(shard) for shard in shards if not is_done(place, sizes, shard))
    return sum(span.stop - span.start for span in spans) / max(1, header.tokens)
