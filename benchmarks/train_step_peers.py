"""The public trainers' part of benchmarks/train_step.py: their cases, their runs, their records."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from train_step_cases import Case, describe

PEER_CASES = {
    "specforge": {
        "b1-s8192-ttt7-flex_attention": Case(8192, 7),
        "b1-s2048-ttt7-flex_attention": Case(2048, 7),
        "b1-s8192-ttt3-flex_attention": Case(8192, 3),
    },
    "speculators": {
        # A window of 2,048 hides nothing from 2,048 tokens; at 8,192 it saves attention.
        "s8192-ttt7-full-attn-head-trained": Case(8192, 7),
        "s2048-ttt7-win2048-head-trained": Case(2048, 7),
        "s8192-ttt3-win2048-head-trained": Case(8192, 3),
    },
}


def peer(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """Run a peer's script over its cases and translate what it measured."""
    lines = Path(args.work) / f"{name}.jsonl"
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.unlink(missing_ok=True)
    chosen = [key for key, case in PEER_CASES[name].items() if case.name in args.cases]
    command = [
        sys.executable, str(Path(args.peers) / f"train_{name}.py"), "--out", str(lines),
        "--device", args.device, "--shape", args.shape, "--warmup", str(args.warmup),
        "--steps", str(args.repeats), "--only", *chosen,
    ]  # fmt: skip
    command += [] if args.device == "cuda" else ["--seq-scale", "8"]
    command += ["--deadline-s", str(args.peer_seconds / 2)]
    try:
        subprocess.run(command, check=False, timeout=args.peer_seconds)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {args.peer_seconds:.0f} s")
    records = []
    measured = lines.read_text().splitlines() if lines.exists() else []
    for text in measured:
        line = json.loads(text)
        case = PEER_CASES[name].get(line["name"].removesuffix("-adamw"))
        if case is None:
            continue
        record = describe(name, case, " ".join([f"train_{name}.py", *command[2:]]))
        record["case"] = line["name"]
        if "step_s" in line:
            record |= {
                "tokens_per_s": line["tokens_per_s"],
                "seconds": line["step_s"]["median"],
                "mfu": line["mfu_datasheet"],
                "peak_gib": line["memory"].get("allocated_gib"),
                "loss": line["last_loss"],
                "trainable": line["trainable_params"],
            }
        else:
            record["failed"] = line.get("failed") or line.get("skipped")
        records.append(record)
    return records
