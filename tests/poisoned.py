"""Targets that give states which are no numbers, for rows or tokens that they are told."""

from collections.abc import Collection, Sequence

from safetensors.torch import load_file, save_file

from eagle3.artifacts import TargetModel
from eagle3.engines.base import RowStates, Sampling, TargetEngine


def poison(target: TargetModel, token: int) -> None:
    """Make the target's embedding of a token not a number."""
    path = target.folder(TargetModel.home) / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, path, {"format": "pt"})


class PoisonedEngine:
    """Another engine, but for a value of the rows that begin with certain tokens."""

    def __init__(
        self,
        engine: TargetEngine,
        poisoned: Collection[Sequence[int]],
        value: float = float("nan"),
        token: int = -1,
    ) -> None:
        """The value stands in the last state of token `token`, and in a middle one after it."""
        self.name, self.engine, self.value, self.token = engine.name, engine, value, token
        self.poisoned = {tuple(row) for row in poisoned}
        self.rows: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise AssertionError("extraction generates nothing")

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        self.rows += map(len, rows)
        found = []
        for row, states in zip(rows, self.engine.states(rows), strict=True):
            aux_T3H, last_TH = states.aux_T3H.clone(), states.last_TH.clone()
            if tuple(row) in self.poisoned:
                last_TH[self.token, 1] = self.value
                aux_T3H[-1, 1, 0] = self.value
            found.append(RowStates(aux_T3H, last_TH))
        return found
