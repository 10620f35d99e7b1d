"""One training step: tokens per second, memory and loss, ours beside the public trainers.

    python benchmarks/train_step.py [--peers FOLDER] [--cases NAME ...] [--shape kimi-k2.5]

Ours runs in this process; a peer in its own, by the script `train_PEER.py` of the given folder,
which writes one JSON line for each case. All use synthetic bf16 states already on the device, one
document that fills the batch. A step is forward, backward, clipping, AdamW and reading the loss;
the device is synchronised at its end, and the median of the timed steps counts.

mfu is 3 x (2 x the forward pass' multiplications) over time and 989.4 TFLOP/s, the data sheet's
dense bf16 rate. For a peer the multiplications are those of its script's formula; for ours they are
those that the step really makes, fewer: rows that count nowhere are not computed, and the embedding
half of q, k, v is computed once. So tokens per second compare, mfu does not. What a case with
`recompute` computes a second time is not counted. With float8 head products mfu is still of the
bf16 rate, and so no share of what the chip can do.

The loss of each case of ours is compared with the plain path of eagle3/ttt.py, eager, in float32
(TF32 off), on the same batch and weights: `loss_float32`.

Shapes: N tokens, V target vocabulary, D draft vocabulary, H width.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_step_cases import CASES, SHAPES, Case, describe
from train_step_peers import PEER_CASES, peer

from eagle3.attention import Documents
from eagle3.drafter import DrafterNet, DraftShape
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.maps import VocabMaps, full_vocab
from eagle3.optimizer import adamw, clip_and_update
from eagle3.ttt import Batch, Unrolling, plan_unrolling, supervised_predictors, unroll

RESULTS = Path("benchmarks/results/train_step.json")
PEAK_FLOPS = 989.4e12
GIB = 2**30
DECAY, MAX_NORM, RATE = 0.8, 0.5, 1e-4
REFERENCE_TOKENS = 8192
"""The plain path holds whole score matrices: of more tokens they do not fit a GPU."""


@dataclass
class Setting:
    """Everything a step reads."""

    net: DrafterNet
    batch: Batch
    embedding_VH: Tensor
    head: TargetHead
    maps: VocabMaps


def build(shape: DraftShape, case: Case, device: str, dtype: torch.dtype) -> Setting:
    """A random network and batch; the target's argmax always has a draft id."""
    torch.manual_seed(0)
    if case.full_vocab:
        shape = replace(shape, draft_vocab=shape.vocab_size)
    with torch.device(device):
        net = DrafterNet(shape)
    net.lm_head.weight.requires_grad_(case.head_trained)
    maps = full_vocab(shape.vocab_size)
    head_VH = torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype) * 0.02
    if not case.full_vocab:
        ids_D = torch.randperm(shape.vocab_size)[: shape.draft_vocab].sort().values
        kept_V = torch.zeros(shape.vocab_size, dtype=torch.bool)
        kept_V[ids_D] = True
        maps = VocabMaps(ids_D - torch.arange(shape.draft_vocab), kept_V)
        # Longer rows, so that no row is skipped for a target outside the draft vocabulary.
        head_VH[ids_D.to(device)] *= 2
    with torch.no_grad():
        net.lm_head.weight.normal_(0, 0.02)
    count, width = case.tokens, shape.hidden_size
    batch = Batch(
        tokens_N=torch.randint(shape.vocab_size, (count,), device=device),
        loss_mask_N=chat_mask(count, case.supervised),
        aux_N3H=torch.randn(count, 3, width, device=device, dtype=dtype),
        last_NH=torch.randn(count, width, device=device, dtype=dtype),
        documents=Documents((0, count)),
    )
    embedding_VH = torch.randn(shape.vocab_size, width, device=device, dtype=dtype) * 0.02
    norm_H = torch.ones(width, device=device, dtype=dtype)
    return Setting(net, batch, embedding_VH, TargetHead(norm_H, 1e-5, head_VH), maps)


def chat_mask(count: int, supervised: float) -> Tensor:
    """Turns of a chat: prompts and answers in turn, 300 to 700 tokens together; bool [N]."""
    if supervised == 1:
        return torch.ones(count, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(count, dtype=torch.bool)
    start = 0
    while start < count:
        length = int(torch.randint(300, 701, (), generator=generator))
        mask[start + round(length * (1 - supervised)) : start + length] = True
        start += length
    return mask


def measure(setting: Setting, case: Case, warmup: int, repeats: int) -> dict[str, Any]:
    """Time steps; the loss is that of the first, on the untouched weights."""
    device = setting.embedding_VH.device
    net, batch = setting.net, setting.batch
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = adamw(trained, RATE, (0.9, 0.95), 0.0)
    given = (net, setting.embedding_VH, setting.head, setting.maps)
    hot = HotPath(*given, recompute=case.recompute, head_products=case.head_products)
    predicted = int(supervised_predictors(batch.loss_mask_N, batch.documents).sum())
    weights = [DECAY**step / predicted for step in range(case.ttt)]
    scale = torch.tensor(weights, device=device)
    losses, seconds = [], []
    for repeat in range(warmup + repeats):
        if device.type == "cuda" and repeat == warmup:
            torch.cuda.reset_peak_memory_stats()
        began = now(device)
        figures = hot.backward(batch, weights)
        loss = (figures.nats_S * scale).sum()
        norm = clip_and_update(optimizer, MAX_NORM)
        hot.refresh()
        losses.append((loss.item(), norm.item()))
        seconds.append(now(device) - began)
    timed = seconds[warmup:]
    peak = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    return {
        "seconds": statistics.median(timed),
        "seconds_least_most": [min(timed), max(timed)],
        "tokens_per_s": case.tokens / statistics.median(timed),
        "peak_gib": peak,
        "loss": losses[0][0],
        "loss_last": losses[-1][0],
        "first_step_s": seconds[0],
    }


def now(device: torch.device) -> float:
    """The host's clock when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def loss_float32(setting: Setting, case: Case) -> float:
    """The plain path's loss, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = replace(
        setting.batch,
        loss_mask_N=setting.batch.loss_mask_N.to(setting.embedding_VH.device),
        aux_N3H=setting.batch.aux_N3H.float(),
        last_NH=setting.batch.last_NH.float(),
    )
    unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, case.ttt)
    head = TargetHead(setting.head.norm_H.float(), setting.head.eps, setting.head.head_VH.float())
    prediction = predict_target(head, setting.maps, batch.last_NH[unrolling.predictors_U])
    del head
    embedding_NH = setting.embedding_VH[batch.tokens_N].float()
    total = 0.0
    for index, (step, state) in enumerate(unroll(setting.net, batch, embedding_NH, unrolling)):
        hidden = setting.net.norm(state[step.counted_M])
        nats, _ = head_loss(hidden, setting.net.lm_head.weight, prediction, step.predictor_M)
        total += DECAY**index * nats.item()
    return total / len(unrolling.predictors_U)


def products(shape: DraftShape, unrolling: Unrolling, case: Case) -> float:
    """FLOPs of a step's matrix products and attention, forward and backward."""
    width, count = shape.hidden_size, case.tokens
    queries = shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    rest = queries * width + 3 * width * shape.intermediate_size
    rows = [len(step.rows_R) for step in unrolling.steps]
    scored = sum(len(step.counted_M) for step in unrolling.steps)
    draft_vocab = shape.vocab_size if case.full_vocab else shape.draft_vocab
    forward = 3 * width * width * count * 2 / 3  # fc's input needs no gradient
    forward += (queries + keys) * width * count  # the embedding half
    forward += keys * width * count + queries * width * rows[0]
    forward += (queries + keys) * width * sum(rows[1:])
    forward += rest * sum(rows)
    forward += draft_vocab * width * scored * (1 if case.head_trained else 2 / 3)
    seen = sum(float((step.rows_R + 1 + i).sum()) for i, step in enumerate(unrolling.steps))
    forward += 2 * queries * seen
    return 6 * forward + 2 * shape.vocab_size * width * len(unrolling.predictors_U)


def ours(args: argparse.Namespace, case: Case, references: dict[Case, float]) -> dict[str, Any]:
    """Build, measure and compare one case; `references` are float32 losses computed so far."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    used = case if args.shape == "kimi-k2.5" else replace(case, tokens=case.tokens // 8)
    shape = SHAPES[args.shape]
    setting = build(shape, used, args.device, dtype)
    expected = None
    if args.reference and used.tokens <= REFERENCE_TOKENS:
        same = replace(used, head_trained=True, recompute=False, head_products="dtype")
        if same not in references:
            references[same] = loss_float32(setting, used)
        expected = references[same]
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    figures = measure(setting, used, args.warmup, args.repeats)
    unrolling = plan_unrolling(setting.batch.loss_mask_N, setting.batch.documents, used.ttt)
    flops = products(shape, unrolling, used)
    difference = None if expected is None else abs(figures["loss"] / expected - 1)
    return figures | {
        "mfu": flops / figures["seconds"] / PEAK_FLOPS,
        "supervised": float(setting.batch.loss_mask_N.float().mean()),
        "loss_float32": expected,
        "loss_difference": difference,
        "trainable": sum(p.numel() for p in setting.net.parameters() if p.requires_grad),
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--peers", help="folder of train_speculators.py and train_specforge.py")
    parser.add_argument("--peer-seconds", type=float, default=300)
    parser.add_argument("--cases", nargs="*", default=names, choices=names)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2.5")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--reference", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--work", default="/tmp/train_step", help="for the peers' lines")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and write; what was measured is kept when a later case fails."""
    args = arguments(given)
    command = " ".join(["benchmarks/train_step.py", *(given or sys.argv[1:])])
    records: list[dict[str, Any]] = []

    def keep(new: list[dict[str, Any]]) -> None:
        records.extend(new)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(records, indent=1) + "\n")
        for record in new:
            print(json.dumps({k: v for k, v in record.items() if k not in ("versions", "command")}))
            sys.stdout.flush()

    references: dict[Case, float] = {}
    for case in CASES:
        if case.name in args.cases:
            described = describe("eagle3", case, command) | {"case": case.name}
            keep([described | ours(args, case, references)])
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    for name in PEER_CASES if args.peers else ():
        keep(peer(args, name))


if __name__ == "__main__":
    main()
