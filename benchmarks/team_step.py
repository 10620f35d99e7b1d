"""One training step shared by several processes: tokens per second, memory, and the gradient.

    python benchmarks/team_step.py [--processes 2] [--shape kimi-k2.5] [--recompute]

The same step, of one micro-batch for each of `--processes` processes, is taken by one process, by
all with whole weights (`train.sharding: none`), and by all with a part of them each (`full`). The
step is that of benchmarks/train_step.py, by the hot path, with the sum of the gradients.

One case alone: torchrun --nproc-per-node 2 benchmarks/team_step.py --member full --out FILE

efficiency is the time of one process over `processes` times the time of all: 1 if sharing is free.
gradient_difference is the largest relative error over the parameters, |g - h| / |h|, where h is
the gradient that the first process makes of all micro-batches alone, before anything is shared.
seconds_summing and seconds_refreshing are of a step with a wait before and after each.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_step import DECAY, GIB, MAX_NORM, RATE, Setting, build, now
from train_step_cases import SHAPES, Case, describe

from eagle3.config import Sharding
from eagle3.hot.step import HotPath
from eagle3.optimizer import adamw, clip_and_update
from eagle3.sharding import Placement, Replicated, place
from eagle3.team import ALONE, MEETING_PLACE, Team, joined
from eagle3.ttt import Batch, supervised_predictors

RESULTS = Path("benchmarks/results/team_step.json")


@dataclass
class Runner:
    """One process' way of taking the step."""

    placement: Placement
    team: Team
    hot: HotPath
    weights: list[float]
    mine: Sequence[Batch]

    @classmethod
    def of(
        cls, setting: Setting, batches: list[Batch], placement: Placement, team: Team, case: Case
    ) -> "Runner":
        """Build the hot path over placed parameters."""
        given = (setting.embedding_VH, setting.head, setting.maps)
        hot = HotPath(placement.net_of_hot_path(), *given, recompute=case.recompute)
        placement.refresh(hot)
        predicted = sum(
            int(supervised_predictors(batch.loss_mask_N, batch.documents).sum())
            for batch in batches
        )
        weights = [DECAY**step / predicted for step in range(case.ttt)]
        return cls(placement, team, hot, weights, team.share(batches))

    def backward(self) -> Tensor:
        """Add the gradients of this process' micro-batches; their part of the loss."""
        loss = torch.zeros((), device=self.hot.device)
        for batch in self.mine:
            nats_S = self.hot.backward(batch, self.weights).nats_S
            loss += (nats_S * torch.tensor(self.weights, device=loss.device)).sum()
        return loss


def micro_batches(setting: Setting, shape_vocab: int, count: int) -> list[Batch]:
    """The setting's batch, and others of other tokens and states."""
    batches = [setting.batch]
    for seed in range(1, count):
        torch.manual_seed(seed)
        first = setting.batch
        batches.append(
            replace(
                first,
                tokens_N=torch.randint_like(first.tokens_N, shape_vocab),
                aux_N3H=torch.randn_like(first.aux_N3H),
                last_NH=torch.randn_like(first.last_NH),
            )
        )
    return batches


def expected_gradients(setting: Setting, batches: list[Batch], case: Case) -> dict[str, Tensor]:
    """Of all micro-batches, by this process alone; on the CPU."""
    alone = Replicated(setting.net, ALONE)
    Runner.of(setting, batches, alone, ALONE, case).backward()
    found = {name: p.grad.cpu() for name, p in setting.net.named_parameters() if p.grad is not None}
    setting.net.zero_grad(set_to_none=True)
    return found


def gradient_difference(runner: Runner, setting: Setting, expected: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's summed gradient, in the process that leads."""
    runner.backward()
    runner.placement.sum_gradients()
    grads = {name: p.grad for name, p in setting.net.named_parameters() if p.grad is not None}
    worst = 0.0
    for name, grad in grads.items():
        whole = runner.placement.to_leader({name: grad})
        if runner.team.leads:
            difference = (whole[name].cpu() - expected[name]).norm() / expected[name].norm()
            worst = max(worst, difference.item())
    setting.net.zero_grad(set_to_none=True)
    return worst


def measure(runner: Runner, setting: Setting, warmup: int, repeats: int) -> dict[str, Any]:
    """Time steps, all processes together; every process must make this call."""
    device, team = runner.hot.device, runner.team
    trained = [p for p in setting.net.parameters() if p.requires_grad]
    optimizer = adamw(trained, RATE, (0.9, 0.95), 0.0)
    seconds, losses, parts = [], [], {}
    for repeat in range(warmup + repeats + 1):
        if repeat == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        apart = repeat == warmup + repeats
        team.meet()
        began = now(device)
        loss = runner.backward()
        summing = now(device) if apart else 0.0
        runner.placement.sum_gradients()
        summed = now(device) if apart else 0.0
        clip_and_update(optimizer, MAX_NORM)
        updated = now(device) if apart else 0.0
        runner.placement.refresh(runner.hot)
        losses.append(sum(team.sums([loss.item()])))
        ended = now(device)
        seconds.append(ended - began)
        if apart:
            parts = {"summing": summed - summing, "refreshing": ended - updated}
    timed = seconds[warmup:-1]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "seconds": statistics.median(timed),
        "seconds_least_most": [min(timed), max(timed)],
        **{f"seconds_{name}": value for name, value in parts.items()},
        "peak_gib": team.largest(peak) / GIB if peak else None,
        "loss": losses[0],
        "loss_last": losses[-1],
    }


def member(args: argparse.Namespace, team: Team, sharding: Sharding) -> dict[str, Any]:
    """Take part in one case, from the building of the network to the figures."""
    device = team.device(torch.device(args.device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = Case(args.tokens, args.ttt, recompute=args.recompute)
    setting = build(SHAPES[args.shape], case, str(device), dtype)
    batches = micro_batches(setting, SHAPES[args.shape].vocab_size, args.processes)
    expected = expected_gradients(setting, batches, case) if team.leads else {}
    gc.collect()
    placement = place(setting.net, sharding, team, device)
    runner = Runner.of(setting, batches, placement, team, case)
    difference = gradient_difference(runner, setting, expected)
    del expected, batches
    setting.batch = runner.mine[0]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    figures = measure(runner, setting, args.warmup, args.repeats)
    return figures | {
        "shape": args.shape,
        "processes": team.size,
        "sharding": sharding,
        "micro_batches": args.processes,
        "tokens_per_s": args.processes * case.tokens / figures["seconds"],
        "gradient_difference": difference,
    }


def start(processes: int, sharding: Sharding) -> dict[str, Any]:
    """Run one case in processes of its own; the figures of the one that leads."""
    with tempfile.TemporaryDirectory(prefix="team-step-") as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--member", sharding, "--out", str(out)]
        members = []
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            own[MEETING_PLACE] = f"file://{folder}/met"
            members.append(subprocess.Popen(command, env=os.environ | own))
        try:
            while any(process.poll() is None for process in members):
                if any(process.poll() for process in members):
                    break
                time.sleep(0.2)
        finally:
            for process in members:
                process.kill()
                process.wait()
        if not out.exists():
            return {"processes": processes, "sharding": sharding, "failed": "see above"}
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="kimi-k2.5")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ttt", type=int, default=7)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--member", choices=("none", "full"), help="take part in one case")
    return parser.parse_args()


def main() -> None:
    """Take every case in turn; in a process that `start` made, take part in one."""
    args = arguments()
    if args.member is not None:
        device = torch.device(args.device)
        alone = os.environ["WORLD_SIZE"] == "1"
        with nullcontext(ALONE) if alone else joined(device, os.environ) as team:
            figures = member(args, team, args.member)
            if team.leads:
                args.out.write_text(json.dumps(figures))
            team.meet()
        return
    # All are on this machine: gloo need not ask which of its addresses others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    command = " ".join(["benchmarks/team_step.py", *sys.argv[1:]])
    case = Case(args.tokens, args.ttt, recompute=args.recompute)
    cases: list[tuple[int, Sharding]] = [(1, "none"), (args.processes, "none")]
    records: list[dict[str, Any]] = []
    for processes, sharding in [*cases, (args.processes, "full")]:
        record = describe("eagle3", case, command) | start(processes, sharding)
        first = (records or [record])[0]
        if "seconds" in record and "seconds" in first:
            record["efficiency"] = first["seconds"] / processes / record["seconds"]
        records.append(record)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(records, indent=1) + "\n")
        print(json.dumps({k: v for k, v in record.items() if k not in ("versions", "command")}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
