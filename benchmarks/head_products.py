"""The draft head's products of states alone: in bfloat16, float8, and float8 added in 14 bits.

    python benchmarks/head_products.py [--rows 3200] [--draft-vocab 163840] [--width 7168]

On synthetic states and a random head, for one chunk of rows as eagle3/hot/head.py takes it: the
median time of a product, and how far its first rows are from the same numbers multiplied in
float32 (relative, over all entries): the error of adding and of the bfloat16 result, not that of
writing numbers in float8. Also the time of making the float8 head from the float32 weights.

Shapes: C rows, H width, D draft vocabulary.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_step import now

from eagle3.hot.float8 import GRADIENT_CODES, UNIT, Float8Head, quantise

RESULTS = Path("benchmarks/results/head_products.json")
COMPARED = 64
"""Rows whose product is made in float32 too."""


def timed(work: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Median milliseconds, after two runs that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        began = now(device)
        work()
        seconds.append(now(device) - began)
    return 1e3 * statistics.median(seconds[2:])


def off(found: Tensor, x: Tensor, y: Tensor) -> float:
    """Relative error of the first rows of x y^T, given x and y as float32 numbers."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = x[:COMPARED] @ y.T
    return float((found[:COMPARED].float() - expected).norm() / expected.norm())


def product(name: str, x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
    """Records of x y^T, for codes and the scales of their rows."""
    device, (codes_x, scale_x), (codes_y, scale_y) = x[0].device, x, y
    wide_x, wide_y = codes_x.float() * scale_x, codes_y.float() * scale_y
    narrow_x, narrow_y = wide_x.bfloat16(), wide_y.bfloat16()
    records = []

    def keep(kind: str, work: Callable[[], Tensor], like: tuple[Tensor, Tensor]) -> None:
        error = off(work(), like[0].float(), like[1].float())
        spent = timed(work, device)
        rate = 2 * codes_x.shape[0] * codes_y.numel() / spent / 1e9
        records.append({"product": name, "kind": kind, "ms": spent, "tflops": rate, "off": error})

    keep("bfloat16", lambda: narrow_x @ narrow_y.T, (narrow_x, narrow_y))
    for fast in (False, True):
        given = (codes_x, codes_y.T, scale_x, scale_y.T.contiguous())
        keep(
            "float8, fast accumulation" if fast else "float8",
            lambda given=given, fast=fast: torch._scaled_mm(  # type: ignore[misc]
                *given, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
            (wide_x, wide_y),
        )
    return records


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3200)
    parser.add_argument("--draft-vocab", type=int, default=163_840)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(given)
    device = torch.device(args.device)
    torch.manual_seed(0)
    weight_DH = torch.randn(args.draft_vocab, args.width, device=device) * 0.02
    head = Float8Head(weight_DH, torch.bfloat16)
    spent = timed(lambda: head.take_over(weight_DH, weight_DH), device, repeats=3)
    records = [{"product": "none", "kind": "float8 head from float32 weights", "ms": spent}]
    hidden_CH = torch.randn(args.rows, args.width, device=device).bfloat16()
    records += product("logits", quantise(hidden_CH), (head.rows_DH, head.scale_1D.T))
    logits_CD = head.logits(hidden_CH).float()
    grad_CD = logits_CD.softmax(-1)
    grad_CD[torch.arange(args.rows), (2 * logits_CD).argmax(-1)] -= 1
    del logits_CD
    unit = (
        (grad_CD * UNIT).to(GRADIENT_CODES),
        torch.full((args.rows, 1), 1 / UNIT, device=device),
    )
    del grad_CD
    records += product("gradient of states", unit, (head.columns_HD, head.scale_1H.T))
    place = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    shape = {"rows": args.rows, "draft_vocab": args.draft_vocab, "width": args.width}
    records = [record | shape | {"device": place} for record in records]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(records, indent=1) + "\n")
    for record in records:
        print({k: v for k, v in record.items() if k not in shape})


if __name__ == "__main__":
    main()
