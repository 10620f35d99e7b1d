"""What is asked of a serving engine, what it answered, and asking for many answers at a time."""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from eagle3.engines.base import Sampling
from eagle3.engines.counters import SpecCounters

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """One prompt, and how it is to be answered."""

    prompt: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Served:
    """What a server did with some prompts."""

    answers: list[list[int]]
    seconds: float
    counters: SpecCounters
    """Counts of these prompts alone; zero where no drafter runs."""

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer) for answer in self.answers)


class ServingEngine(Protocol):
    """A running server that answers prompts and counts what its drafter did."""

    name: str
    """Engine and version."""

    def run(self, asked: Sequence[Asked], at_once: int) -> Served:
        """Answer the prompts, at most `at_once` at a time."""


def seed_of(seed: int, prompt: Sequence[int]) -> int:
    """A seed for one prompt: the same in any order and batch, different between prompts."""
    digest = hashlib.sha256(json.dumps([seed, list(prompt)]).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def in_parallel(ask: Callable[[Item], Result], items: Sequence[Item], at_once: int) -> list[Result]:
    """Ask for every item, some at a time, and give the results in order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, items))
