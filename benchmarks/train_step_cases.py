"""The cases of benchmarks/train_step.py, and what a record says of each before it is measured."""

import datetime
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from eagle3.config import HeadProducts
from eagle3.throughput import MEASURED_SHAPE as KIMI

PACKAGES = ("torch", "triton", "transformers", "speculators", "specforge")

TINY = replace(
    KIMI,
    hidden_size=64,
    vocab_size=512,
    draft_vocab=128,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
SHAPES = {"kimi-k2.5": KIMI, "tiny": TINY}


@dataclass(frozen=True)
class Case:
    """One batch and one way to train on it."""

    tokens: int
    ttt: int
    supervised: float = 1.0
    full_vocab: bool = False
    head_trained: bool = True
    recompute: bool = False
    head_products: HeadProducts = "dtype"

    @property
    def name(self) -> str:
        """As given to --cases."""
        parts = [f"s{self.tokens}", f"ttt{self.ttt}"]
        parts += [f"supervised{self.supervised:.2f}"] if self.supervised < 1 else []
        parts += ["vocab-full"] if self.full_vocab else []
        parts += [] if self.head_trained else ["head-frozen"]
        parts += ["recompute"] if self.recompute else []
        return "-".join([*parts, "float8"] if self.head_products == "float8" else parts)


CASES = (
    Case(8192, 7),
    Case(2048, 7),
    Case(8192, 7, supervised=0.65),
    Case(8192, 3),
    Case(8192, 7, full_vocab=True, head_trained=False),
    Case(8192, 7, full_vocab=True),
    Case(8192, 7, head_trained=False),
    Case(2048, 3),
    Case(8192, 7, recompute=True),
    Case(16384, 7),
    Case(16384, 7, recompute=True),
    Case(8192, 7, head_products="float8"),
    Case(8192, 7, full_vocab=True, head_trained=False, head_products="float8"),
    Case(8192, 7, full_vocab=True, head_products="float8"),
    Case(8192, 7, head_trained=False, head_products="float8"),
)


def describe(trainer: str, case: Case, command: str) -> dict[str, Any]:
    """What a record says before anything is measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "trainer": trainer,
        **{k: v for k, v in asdict(case).items() if k != "full_vocab"},
        "draft_vocab": KIMI.vocab_size if case.full_vocab else KIMI.draft_vocab,
        "device": device,
        "versions": versions,
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
