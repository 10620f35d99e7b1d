"""Frames: small where a row begins like another, exact, and like any other zstd."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numcodecs.zstd import Zstd

from eagle3.store.frames import frame_of, read_frame


def noise(count: int, values: int = 256) -> np.ndarray:
    return np.random.default_rng(count).integers(0, values, count, dtype=np.uint8)


def read_back(frame: bytes, count: int) -> np.ndarray:
    plane = np.empty(count, np.uint8)
    read_frame(memoryview(frame), plane)
    return plane


@pytest.mark.parametrize("count", [1, 100, 300_000])
@pytest.mark.parametrize("values", [1, 12, 256])
def test_a_plane_is_read_as_it_was(count: int, values: int) -> None:
    plane = noise(count, values)

    assert np.array_equal(read_back(frame_of(plane), count), plane)


def test_noise_is_stored_as_it_is() -> None:
    plane = noise(300_000)

    assert plane[1000:2000].tobytes() in frame_of(plane)


def test_a_row_that_begins_like_another_takes_little_more_than_one() -> None:
    """However far before it that one lies, as in the chunks of Kimi-K2.5."""
    row, between = noise(300_000), noise(1_000_000)
    alone = len(frame_of(np.concatenate([row, between])))

    assert len(frame_of(np.concatenate([row, between, row]))) < alone + len(row) / 50


def test_the_coder_of_single_bytes_is_not_left_out() -> None:
    """Four of 256 values: two bits of eight."""
    assert len(frame_of(noise(300_000, values=4))) < 300_000 * 0.26


def test_equal_planes_are_equal_frames_in_any_number_of_threads() -> None:
    planes = [noise(300_000, values=12)] * 16
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(frame_of, planes))) == 1


def test_frames_of_zstd_levels_are_read_too() -> None:
    """Stores that were written before this module."""
    plane = noise(5000, values=12)

    assert np.array_equal(read_back(bytes(Zstd(1, checksum=True).encode(plane)), 5000), plane)


@pytest.mark.parametrize("values", [12, 256])
def test_any_flipped_byte_of_the_content_is_refused(values: int) -> None:
    frame = frame_of(noise(3000, values))
    # Behind the magic number, the descriptor and the size of the content.
    for place in range(7, len(frame)):
        flipped = bytearray(frame)
        flipped[place] ^= 0x10
        with pytest.raises((RuntimeError, ValueError)):
            read_back(bytes(flipped), 3000)


def test_a_frame_that_holds_more_than_was_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        read_back(frame_of(noise(3000)), 2999)
