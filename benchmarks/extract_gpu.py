"""What the store adds to a target of Kimi-K2.5's width that runs on a GPU.

    python benchmarks/extract_gpu.py --folder FOLDER [--layers 24] [--tokens 131072]

**The target has random weights**: a Llama of Kimi-K2.5's width, as deep as asked. Timed in turn,
over the same calls of the same rows of random tokens: its decoder alone, whose states nobody takes;
`TransformersEngine.states`, which copies them into memory; and the filling of a store, shard by
shard, synced. `overhead` is the last over the first, less one, of the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from store_results import keep
from store_states import KIMI_WIDTH
from transformers import LlamaConfig, LlamaModel

from eagle3.engines.transformers import TransformersEngine
from eagle3.fill import TokenProgress, calls, fill
from eagle3.progress import ConsoleReporter
from eagle3.refusals import Refusals
from eagle3.store.layout import Header
from eagle3.store.rows import Rows, rows_sha256
from eagle3.store.writer import StateWriter

VOCAB = 32_000


class RandomTarget(TransformersEngine):
    """The engine over a model that no folder holds."""

    def __init__(self, layers: int, width: int, device: torch.device) -> None:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=18 * width // 7,
            num_hidden_layers=layers,
            num_attention_heads=width // 112,
            num_key_value_heads=width // 896,
            head_dim=128,
            max_position_embeddings=4096,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            self._model = self._decoder = LlamaModel(config).eval()
        torch.set_default_dtype(torch.float32)
        self.name = f"{layers} random layers"
        self._aux_layers, self._last_layer = (2, layers // 2, layers - 3), layers
        self._end_ids, self.batches_rows = [0], device.type == "cuda"

    @torch.no_grad()
    def forward(self, rows: Sequence[Sequence[int]]) -> None:
        """As `states`, and nothing is kept."""
        for batch in [rows] if self.batches_rows else [[row] for row in rows]:
            ids_BL = torch.tensor(batch, device=self._model.device)
            self._decoder(input_ids=ids_BL, use_cache=False)
        if self.batches_rows:
            torch.cuda.synchronize()


def random_rows(tokens: int, length: int) -> Rows:
    """Rows of one length."""
    count = tokens // length
    return Rows(
        tokens_N=np.random.default_rng(0).integers(VOCAB, size=count * length, dtype=np.int32),
        loss_mask_N=np.ones(count * length, np.bool_),
        offsets_R1=np.arange(count + 1, dtype=np.int64) * length,
        domains=("benchmark",) * count,
        row_ids=tuple(f"row{row}" for row in range(count)),
    )


def main() -> None:
    """Time the three in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where stores are written")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=KIMI_WIDTH)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--shard-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    engine = RandomTarget(args.layers, args.width, torch.device(args.device))
    rows = random_rows(args.tokens, args.row_tokens)
    header = Header(
        target="random weights",
        target_fingerprint="",
        rows_sha256=rows_sha256(rows),
        tokens=rows.num_tokens,
        rows=len(rows),
        hidden_size=args.width,
        aux_layers=(2, args.layers // 2, args.layers - 3),
        last="benchmark",
        dtype="bfloat16",
        engine=engine.name,
        chunk_tokens=64,
        shard_tokens=args.shard_tokens,
    )
    grouped = [
        [rows.tokens_N[rows.span(row)].tolist() for row in call]
        for call in calls(rows, args.shard_tokens)
    ]

    def filling() -> None:
        with TemporaryDirectory(prefix="extract-gpu-", dir=args.folder) as folder:
            writer = StateWriter(Path(folder) / "train.zarr", header, rows)
            progress = TokenProgress(ConsoleReporter(), rows.num_tokens)
            started = time.perf_counter()
            fill(writer, engine, "train", progress, Refusals(0))
            seconds["filling"].append(time.perf_counter() - started)

    def timed(name: str, work: Callable[[Sequence[Sequence[int]]], object]) -> None:
        started = time.perf_counter()
        for call in grouped:
            work(call)
        seconds[name].append(time.perf_counter() - started)

    for call in grouped[:2]:
        engine.states(call)
    seconds: dict[str, list[float]] = {"decoder": [], "states": [], "filling": []}
    for _ in range(args.repeats):
        timed("decoder", engine.forward)
        timed("states", engine.states)
        filling()
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    facts = {
        "target": f"random weights, {args.layers} layers of width {args.width}",
        "device": device,
        "tokens": rows.num_tokens,
        "bytes_per_token": 8 * args.width,
        "shard_tokens": args.shard_tokens,
        "seconds": {name: [round(each, 3) for each in found] for name, found in seconds.items()},
        "tokens_per_s": {name: round(rows.num_tokens / middle[name]) for name in middle},
        "overhead": round(middle["filling"] / middle["decoder"] - 1, 3),
    }
    keep("extract_gpu", f"{args.layers} layers", facts)


if __name__ == "__main__":
    main()
