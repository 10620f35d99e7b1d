"""What one draft step costs at batch one, part by part: layer, head, choice, and the whole chain.

    python benchmarks/draft_step.py [--shape kimi-k2.5] [--context 2048] [--out FILE]

Latency of a drafter is memory traffic: every weight is read once a step. So each part is replayed
as a CUDA graph over weights that the cache does not hold (copies in rotation, 1.2 GB), and its
bytes over its time are set beside the data sheet's 4.8 TB/s. The layer is that of `eagle3.drafter`
with its weights fused and RoPE's table ready, as in serving engines; it is compared with
`DrafterNet.decode` before anything is timed. `ranks: 8` is one rank's share of eight, without the
all-reduce.

parts of a record: layer | fc | head | argmax | step (embedding, layer, norm, head, argmax, map: a
chain of three, per draft). `us` is the median over 200 replays.

Shapes: H width, A query heads, K key-value heads, E head width, D draft vocabulary, C cached rows.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train_step_cases import SHAPES

from eagle3.attention import rotate
from eagle3.drafter import DraftCache, DrafterNet, DraftShape

RESULTS = Path("benchmarks/results/draft_step.json")
BYTES_PER_S = 4.8e12
"""Of an H200's memory, by its data sheet."""
MORE_THAN_THE_CACHE = 1.2e9
WARM_UP, REPLAYS, CHAIN = 10, 200, 3


class FusedLayer:
    """The drafter's layer over a cache of C rows, the last of which is the step's own."""

    def __init__(self, net: DrafterNet, context: int) -> None:
        layer, attention, mlp = net.midlayer, net.midlayer.self_attn, net.midlayer.mlp
        self.shape = shape = net.shape
        self.norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm)
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = torch.cat([part.weight for part in parts])
        self.o = attention.o_proj.weight
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down = mlp.down_proj.weight
        like = self.o
        size = (1, shape.num_key_value_heads, context, shape.head_dim)
        self.keys_1KCE = torch.randn(size, device=like.device, dtype=like.dtype)
        self.values_1KCE = torch.randn(size, device=like.device, dtype=like.dtype)
        self.position_1 = torch.tensor([context - 1], device=like.device)
        # RoPE turns ones by cos - sin in the first half and by cos + sin in the second.
        ones_1E = torch.ones(1, 1, shape.head_dim, device=like.device)
        first, second = rotate(ones_1E, self.position_1, shape.rope_theta).chunk(2, dim=-1)
        self.cos = ((first + second) / 2).repeat(1, 1, 2).to(like.dtype)
        self.sin = ((second - first) / 2).repeat(1, 1, 2).to(like.dtype)

    @property
    def bytes(self) -> int:
        """Read by a step."""
        read = (self.qkv, self.o, self.gate_up, self.down, self.keys_1KCE, self.values_1KCE)
        return sum(tensor.nbytes for tensor in read)

    def __call__(self, embedding_1H: Tensor, hidden_1H: Tensor) -> Tensor:
        """The state that is fed back, [1, H]; as `DrafterNet.decode`."""
        shape, (norm_e, norm_h, norm_mlp) = self.shape, self.norms
        both = torch.cat([norm_e(embedding_1H), norm_h(hidden_1H)], dim=-1)
        heads = (shape.num_attention_heads, *(shape.num_key_value_heads,) * 2)
        qkv = F.linear(both, self.qkv).unflatten(-1, (-1, shape.head_dim))
        query_1AE, key_1KE, value_1KE = qkv.split(heads, dim=1)
        query_1AE = self._rotate(query_1AE)
        self.keys_1KCE[:, :, -1] = self._rotate(key_1KE)
        self.values_1KCE[:, :, -1] = value_1KE
        attended = F.scaled_dot_product_attention(
            query_1AE[:, :, None],
            self.keys_1KCE,
            self.values_1KCE,
            enable_gqa=shape.num_attention_heads != shape.num_key_value_heads,
        )
        hidden_1H = hidden_1H + F.linear(attended.flatten(1), self.o)
        gate, up = F.linear(norm_mlp(hidden_1H), self.gate_up).chunk(2, dim=-1)
        return hidden_1H + F.linear(F.silu(gate) * up, self.down)

    def _rotate(self, x_1XE: Tensor) -> Tensor:
        first, second = x_1XE.chunk(2, dim=-1)
        return x_1XE * self.cos + torch.cat([-second, first], dim=-1) * self.sin


def network(shape: DraftShape, device: torch.device, dtype: torch.dtype) -> DrafterNet:
    """A drafter with random weights."""
    with torch.device(device):
        net = DrafterNet(shape).to(dtype)
    return net.eval().requires_grad_(False)


def require_same(layer: FusedLayer, net: DrafterNet) -> None:
    """The fused layer is the drafter's own.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    context, like = layer.keys_1KCE.shape[2], layer.o
    embedding_1H, hidden_1H = torch.randn(2, 1, net.shape.hidden_size).to(like)
    cache = DraftCache(_rows(layer.keys_1KCE), _rows(layer.values_1KCE))
    expected = net.decode(embedding_1H, hidden_1H, layer.position_1, cache)
    assert cache.length == context
    rtol = 1e-4 if like.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(layer(embedding_1H, hidden_1H), expected, rtol=rtol, atol=rtol)


def _rows(cached_1KCE: Tensor) -> Tensor:
    """All rows but the last, as the drafter's cache holds them: [C - 1, K, E]."""
    return cached_1KCE[0, :, :-1].transpose(0, 1)


class Bench:
    """Times parts of one shape and keeps the records."""

    def __init__(self, device: torch.device, context: int) -> None:
        self.device, self.context = device, context
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.records: list[dict[str, Any]] = []

    def parts(self, shape: DraftShape) -> None:
        """All parts of one drafter, with the shape's draft vocabulary and the full one."""
        self.layer(shape, ranks=1, compiled=False)
        self.layer(shape, ranks=1, compiled=self.device.type == "cuda")
        self.layer(shape, ranks=8, compiled=False)
        self.product("fc", shape.hidden_size, 3 * shape.hidden_size)
        for rows in (shape.draft_vocab, shape.vocab_size):
            for ranks in (1, 8):
                share = rows // ranks
                self.product("head", share, shape.hidden_size, draft_vocab=rows, ranks=ranks)
                self.argmax(share, draft_vocab=rows, ranks=ranks)
            self.step(replace(shape, draft_vocab=rows))

    def layer(self, shape: DraftShape, ranks: int, compiled: bool) -> None:
        """The layer alone, over a full cache."""
        share = replace(
            shape,
            draft_vocab=1,
            num_attention_heads=max(1, shape.num_attention_heads // ranks),
            num_key_value_heads=max(1, shape.num_key_value_heads // ranks),
            intermediate_size=shape.intermediate_size // ranks,
        )
        net = network(share, self.device, self.dtype)
        layers = [FusedLayer(net, self.context)]
        require_same(layers[0], net)
        while self._fits_the_cache(len(layers) * layers[0].bytes):
            net = network(share, self.device, self.dtype)
            layers.append(FusedLayer(net, self.context))
        steps = [torch.compile(layer.__call__) if compiled else layer for layer in layers]
        inputs = torch.randn(2, 1, shape.hidden_size, device=self.device, dtype=self.dtype)

        def call() -> None:
            for step in steps:
                step(*inputs)

        self._record("layer", call, len(steps), layers[0].bytes, ranks=ranks, compiled=compiled)

    def product(self, part: str, rows: int, columns: int, **facts: Any) -> None:
        """A matrix times one vector."""
        size = rows * columns * self.dtype.itemsize
        copies = math.ceil(MORE_THAN_THE_CACHE / size) if self.device.type == "cuda" else 1
        weights = [self._weight(rows, columns) for _ in range(copies)]
        x = torch.randn(1, columns, device=self.device, dtype=self.dtype)

        def call() -> None:
            for weight in weights:
                F.linear(x, weight)

        self._record(part, call, copies, size, **facts)

    def argmax(self, rows: int, **facts: Any) -> None:
        """The choice among logits."""
        logits = torch.randn(16, 1, rows, device=self.device, dtype=self.dtype)

        def call() -> None:
            for row in logits:
                row.argmax(dim=-1)

        self._record("argmax", call, 16, None, **facts)

    def step(self, shape: DraftShape) -> None:
        """Whole drafts, each fed by the one before."""
        net = network(shape, self.device, self.dtype)
        layer = FusedLayer(net, self.context)
        table_VH = self._weight(shape.vocab_size, shape.hidden_size)
        ids_D = torch.randperm(shape.vocab_size, device=self.device)[: shape.draft_vocab]
        hidden_1H = torch.randn(1, shape.hidden_size, device=self.device, dtype=self.dtype)
        token_1 = torch.zeros(1, dtype=torch.long, device=self.device)

        def call() -> None:
            hidden, token = hidden_1H, token_1
            for _ in range(CHAIN):
                hidden = layer(F.embedding(token, table_VH), hidden)
                token = ids_D[net.logits(hidden).argmax(dim=-1)]

        read = layer.bytes + net.lm_head.weight.nbytes
        self._record("step", call, CHAIN, read, draft_vocab=shape.draft_vocab)

    def _record(
        self, part: str, call: Callable[[], None], calls: int, read: int | None, **facts: Any
    ) -> None:
        seconds = statistics.median(replays(call, self.device)) / calls
        record = {"part": part, **facts, "context": self.context, "us": 1e6 * seconds}
        if read:
            rate = read / seconds
            record |= {"mb_read": read / 1e6, "tb_per_s": rate / 1e12}
            record |= {"of_roofline": rate / BYTES_PER_S}
        print(json.dumps(record), flush=True)
        self.records.append(record)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fits_the_cache(self, size: int) -> bool:
        return self.device.type == "cuda" and size < MORE_THAN_THE_CACHE

    def _weight(self, rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
        return weight.normal_(0, columns**-0.5)


def replays(call: Callable[[], None], device: torch.device) -> Iterator[float]:
    """Seconds of a call, again and again: replayed as a CUDA graph, or plainly on a CPU."""
    if device.type != "cuda":
        for _ in range(WARM_UP):
            started = time.perf_counter()
            call()
            yield time.perf_counter() - started
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for repeat in range(WARM_UP + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            yield start.elapsed_time(end) / 1e3


def main(given: Sequence[str] | None = None) -> None:
    """Measure every part and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2.5")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, default=2048, help="rows in the cache")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(given)
    device = torch.device(args.device)
    torch.manual_seed(0)
    bench = Bench(device, args.context)
    with torch.inference_mode():
        bench.parts(SHAPES[args.shape])
    facts = {
        "shape": args.shape,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {"torch": version("torch")},
        "command": " ".join(["python benchmarks/draft_step.py", *(given or sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([record | facts for record in bench.records], indent=1) + "\n")


if __name__ == "__main__":
    main()
