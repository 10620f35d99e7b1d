"""One plane of a chunk as a zstd frame, which carries its checksum, and back.

A plane has two kinds of bytes: noise, and tokens that are in another row of the chunk, too, since
conversations begin alike. zstd's levels look for matches of a few bytes, find them in noise by
chance, and take longest to undo just these. So here the table for short matches is too small to
find any, and the search for long ones, which the levels leave off, is on. Such frames are smaller
than those of level 1, and sooner decoded (docs/decisions/0018-frames-without-short-matches.md).
Whoever reads zstd reads them.
"""

import numpy as np
from numcodecs.zstd import decompress
from zstandard import ZstdCompressionParameters, ZstdCompressor

# Level 1 for all that is not said: the least search, and bytes that no code makes fewer are stored
# as they are.
SETTINGS = ZstdCompressionParameters.from_level(
    1,
    hash_log=6,
    enable_ldm=True,
    ldm_min_match=64,
    # 8 MiB, more than a plane: a row before this one may lie anywhere in the chunk.
    window_log=23,
    write_checksum=True,
)


def frame_of(plane: np.ndarray) -> bytes:
    """Pack a contiguous array, uint8; equal ones give equal frames."""
    # A compressor of its own, since threads must not share one.
    return ZstdCompressor(compression_params=SETTINGS).compress(plane.data)


def read_frame(frame: memoryview, plane: np.ndarray) -> None:
    """Fill a contiguous array, uint8, with what `frame_of` packed.

    Raises:
        RuntimeError: a byte of it is not as it was packed.
        ValueError: it has more than the array.
    """
    # By numcodecs, since zstandard cannot decode into memory that is there, and fresh memory costs
    # more than decoding.
    decompress(frame, plane)
