"""Codecs for hidden states, side by side in one run: size, and speed on one core.

    python benchmarks/store_codecs.py --store data/hidden_states/train.zarr

Every codec packs the same chunks, one at a time on one thread, in memory: `aux` [n, 3, H] and
`last` [n, H] of so many tokens, as the store cuts them. GB/s are decoded bytes (4 H 2 a token) over
processor time, the best of four passes. The 8-bit ones are not exact: `error` is the root mean
square of what they change over that of the states, and `error_median` that of the median channel,
since a few channels of a target are far larger than the others; both of the last chunk of `last`.

Shapes: n tokens of a chunk, H target width.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import torch
from numcodecs import Blosc, Shuffle, Zstd
from store_results import keep
from store_states import States, kimi_shaped, real_states
from torch import Tensor
from zstandard import frame_content_size

from eagle3.store.frames import frame_of, read_frame
from eagle3.store.packing import from_float8, to_float8

REPEATS = 4
KIMI_TOKENS = 1024
CHOSEN = "byte planes, zstd's long matches"
Parts = list[bytes]


class Packer:
    """A chunk of bfloat16 states to buffers and back, through a chain of codecs."""

    def __init__(self, *codecs: Any, channel_major: bool = False) -> None:
        self.codecs, self.channel_major = codecs, channel_major

    def pack(self, states: Tensor) -> Parts:
        """Encode."""
        bits = states.view(torch.uint16).numpy()
        if self.channel_major:
            bits = np.ascontiguousarray(bits.reshape(len(bits), -1).T)
        return [encode(self.codecs, bits)]

    def unpack(self, parts: Parts, like: Tensor) -> Tensor:
        """Decode."""
        bits = np.frombuffer(decode(self.codecs, parts[0]), np.uint16)
        if self.channel_major:
            bits = np.ascontiguousarray(bits.reshape(-1, len(like)).T)
        return torch.from_numpy(bits.reshape(like.shape).copy()).view(torch.bfloat16)


class PlanesPacker(Packer):
    """As the store does it: the bytes of a value in planes, each packed alone."""

    def pack(self, states: Tensor) -> Parts:
        """Encode."""
        bytes_of = states.view(torch.uint8).numpy().reshape(*states.shape, 2)
        return [encode(self.codecs, np.ascontiguousarray(bytes_of[..., plane])) for plane in (0, 1)]

    def unpack(self, parts: Parts, like: Tensor) -> Tensor:
        """Decode."""
        low, high = (np.frombuffer(decode(self.codecs, part), np.uint8) for part in parts)
        bits = np.left_shift(high, np.uint16(8))
        np.bitwise_or(bits, low, out=bits)
        return torch.from_numpy(bits.reshape(like.shape)).view(torch.bfloat16)


class Float8Packer(Packer):
    """As the store does it."""

    def pack(self, states: Tensor) -> Parts:
        """Encode."""
        codes, scale = to_float8(states)
        return [encode(self.codecs, codes.numpy()), encode(self.codecs, scale.numpy())]

    def unpack(self, parts: Parts, like: Tensor) -> Tensor:
        """Decode."""
        codes = np.frombuffer(decode(self.codecs, parts[0]), np.uint8).reshape(like.shape)
        scale = np.frombuffer(decode(self.codecs, parts[1]), np.float32).reshape(like.shape[:-1])
        return from_float8(torch.from_numpy(codes.copy()), torch.from_numpy(scale.copy()))


class Int8Packer(Packer):
    """Steps of one size per token and layer: the largest value over 127."""

    def pack(self, states: Tensor) -> Parts:
        """Encode."""
        values = states.float()
        step = (values.abs().amax(dim=-1) / 127).clamp(min=1e-30)
        codes = (values / step[..., None]).round_().to(torch.int8)
        return [encode(self.codecs, codes.numpy()), encode(self.codecs, step.numpy())]

    def unpack(self, parts: Parts, like: Tensor) -> Tensor:
        """Decode."""
        codes = np.frombuffer(decode(self.codecs, parts[0]), np.int8).reshape(like.shape)
        step = np.frombuffer(decode(self.codecs, parts[1]), np.float32).reshape(like.shape[:-1])
        values = torch.from_numpy(codes.copy()).float() * torch.from_numpy(step.copy())[..., None]
        return values.to(torch.bfloat16)


class LongMatches:
    """A frame as the store writes and reads it."""

    def encode(self, values: np.ndarray) -> bytes:
        """Pack."""
        return frame_of(values)

    def decode(self, frame: bytes) -> np.ndarray:
        """Unpack."""
        plane = np.empty(frame_content_size(frame), np.uint8)
        read_frame(memoryview(frame), plane)
        return plane


def encode(codecs: Any, values: np.ndarray) -> bytes:
    """Through all codecs in turn."""
    found: Any = values.reshape(-1)
    for codec in codecs:
        found = codec.encode(found)
    return bytes(found) if codecs else found.tobytes()


def decode(codecs: Any, found: Any) -> Any:
    """Back through all codecs."""
    for codec in reversed(codecs):
        found = codec.decode(found)
    return found


PACKERS: dict[str, Packer] = {
    "none": Packer(),
    "zstd 1": Packer(Zstd(1)),
    "byte planes, zstd 1": PlanesPacker(Zstd(1, checksum=True)),
    CHOSEN: PlanesPacker(LongMatches()),
    "byte planes, zstd 2": PlanesPacker(Zstd(2, checksum=True)),
    "byte planes, zstd 3": PlanesPacker(Zstd(3, checksum=True)),
    "byte shuffle, zstd 1": Packer(Shuffle(2), Zstd(1, checksum=True)),
    "byte shuffle, zstd 3": Packer(Shuffle(2), Zstd(3, checksum=True)),
    "byte shuffle, zstd 9": Packer(Shuffle(2), Zstd(9, checksum=True)),
    "channel-major, byte shuffle, zstd 1": Packer(Shuffle(2), Zstd(1), channel_major=True),
    "Blosc, byte shuffle, lz4": Packer(Blosc("lz4", 5, Blosc.SHUFFLE)),
    "Blosc, byte shuffle, zstd 1": Packer(Blosc("zstd", 1, Blosc.SHUFFLE)),
    "Blosc, byte shuffle, zstd 5": Packer(Blosc("zstd", 5, Blosc.SHUFFLE)),
    "Blosc, bit shuffle, zstd 1": Packer(Blosc("zstd", 1, Blosc.BITSHUFFLE)),
    "Blosc, bit shuffle, lz4": Packer(Blosc("lz4", 5, Blosc.BITSHUFFLE)),
    "float8, zstd 1": Float8Packer(Zstd(1, checksum=True)),
    "int8, zstd 1": Int8Packer(Zstd(1, checksum=True)),
}


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of processor time, the least of some runs, and what it returned."""
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        found = work()
        seconds.append(time.process_time() - started)
    return min(seconds), found


def measure(states: States, packer: Packer, chunk_tokens: int) -> dict[str, float]:
    """Pack and unpack all chunks, and compare."""
    pieces = [
        array[start : start + chunk_tokens]
        for array in (states.aux_n3H, states.last_nH)
        for start in range(0, len(array), chunk_tokens)
    ]
    raw = sum(piece.numel() * 2 for piece in pieces)
    write_s, packed = best(lambda: [packer.pack(piece) for piece in pieces])
    read_s, found = best(
        lambda: [packer.unpack(*pair) for pair in zip(packed, pieces, strict=True)]
    )
    size = sum(len(part) for parts in packed for part in parts)
    facts = {
        "ratio": round(size / raw, 4),
        "bytes_per_token": round(size / len(states.last_nH), 1),
        "write_gb_s": round(raw / write_s / 1e9, 3),
        "read_gb_s": round(raw / read_s / 1e9, 3),
    }
    if all(map(torch.equal, found, pieces)):
        return facts
    return facts | errors(pieces, found)


def errors(pieces: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """Relative error over all values, and of the median channel, of the last piece."""
    wanted, got = pieces[-1].float(), found[-1].float()
    size_H = wanted.square().mean(dim=0).sqrt()
    off_H = (got - wanted).square().mean(dim=0).sqrt()
    return {
        "error": round(((got - wanted).norm() / wanted.norm()).item(), 4),
        "error_median": round((off_H / size_H).median().item(), 4),
    }


def main() -> None:
    """Measure every codec on both kinds of states."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="A bfloat16 store of the demo.")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--chunks", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--codecs", nargs="*", default=list(PACKERS), choices=list(PACKERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    numcodecs.blosc.set_nthreads(1)
    numcodecs.blosc.use_threads = False
    for case, states in (
        ("smollm2", real_states(args.store)),
        ("kimi-shaped", kimi_shaped(0.01, 1000, pool=KIMI_TOKENS)),
    ):
        codecs = {name: measure(states, PACKERS[name], args.chunk_tokens) for name in args.codecs}
        chunks = {
            tokens: measure(states, PACKERS[CHOSEN], tokens)["ratio"] for tokens in args.chunks
        }
        facts = {
            "states": states.name,
            "tokens": len(states.last_nH),
            "raw_bytes_per_token": states.bytes_per_token,
            "chunk_tokens": args.chunk_tokens,
            "codecs": codecs,
            "ratio_by_chunk_tokens": dict(sorted(chunks.items())),
        }
        few = "" if args.codecs == list(PACKERS) else f", {len(args.codecs)} codecs"
        keep("store_codecs", f"{case}{few}", facts)


if __name__ == "__main__":
    main()
