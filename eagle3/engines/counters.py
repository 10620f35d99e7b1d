"""What an engine counts while it speculates, and the acceptance that follows from it.

Source: vLLM's `/metrics` (Prometheus text), vllm/v1/spec_decode/metrics.py; contracts in docs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from eagle3.errors import EngineError

_LINE = re.compile(r"^(?P<name>[\w:]+?)(?:_total)?\{(?P<labels>[^}]*)\} (?P<value>\S+)$")
_POSITION = re.compile(r'position="(\d+)"')

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class SpecCounters:
    """Counts since an engine started, or, as the difference of two readings, of one run."""

    drafts: int
    """Chains proposed and verified, one per target step of a request."""
    draft_tokens: int
    accepted: int
    accepted_at: tuple[int, ...]
    """Chains of which position i was accepted; each position's rate is over all chains."""

    def __sub__(self, earlier: "SpecCounters") -> "SpecCounters":
        assert len(self.accepted_at) == len(earlier.accepted_at), "readings of two engines"
        return SpecCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted - earlier.accepted,
            tuple(
                now - was for now, was in zip(self.accepted_at, earlier.accepted_at, strict=True)
            ),
        )

    def __add__(self, other: "SpecCounters") -> "SpecCounters":
        length = max(len(self.accepted_at), len(other.accepted_at))
        mine, theirs = (
            (*counts, *[0] * (length - len(counts)))
            for counts in (self.accepted_at, other.accepted_at)
        )
        return SpecCounters(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            tuple(a + b for a, b in zip(mine, theirs, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per target step, the target's own included: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of chains accepted at each position; 1 + their sum is the acceptance length."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.accepted_at)


NOTHING_COUNTED = SpecCounters(drafts=0, draft_tokens=0, accepted=0, accepted_at=())


def total(counters: Iterable[SpecCounters]) -> SpecCounters:
    """The counts of several runs as one."""
    return sum(counters, NOTHING_COUNTED)


def parse_counters(metrics: str, server: str) -> SpecCounters:
    """Read vLLM's Prometheus text; several engines of one server (data parallel) are added up.

    Raises:
        EngineError: the text has no counters of speculation.
    """
    sums = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    at: dict[int, int] = {}
    found = False
    for line in metrics.splitlines():
        match = _LINE.match(line)
        if not match or not match["name"].startswith(PREFIX):
            continue
        name, value = match["name"].removeprefix(PREFIX), int(float(match["value"]))
        if name in sums:
            sums[name] += value
            found = True
        elif name == "accepted_tokens_per_pos" and (position := _POSITION.search(match["labels"])):
            at[int(position[1])] = at.get(int(position[1]), 0) + value
    if not found:
        raise EngineError(
            f"{server}/metrics has no {PREFIX}* counters: the server runs without a drafter; "
            "start it with --speculative-config naming one"
        )
    accepted_at = tuple(at.get(position, 0) for position in range(max(at, default=-1) + 1))
    return SpecCounters(sums["drafts"], sums["draft_tokens"], sums["accepted_tokens"], accepted_at)


def generated_tokens(metrics: str) -> int:
    """Tokens that a vLLM server has generated since it started."""
    matches = (_LINE.match(line) for line in metrics.splitlines())
    return sum(
        int(float(match["value"]))
        for match in matches
        if match and match["name"] == "vllm:generation_tokens"
    )
