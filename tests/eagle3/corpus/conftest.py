"""The tiny target, brought and run for real, and an engine that is killed in the middle."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle3.artifacts import TargetModel
from eagle3.config import TargetParams
from eagle3.engines.base import RowStates, Sampling, TargetEngine
from eagle3.engines.transformers import TransformersEngine
from eagle3.target import bring_target


class CountedEngine:
    """Another engine, with a record of its calls, that stops the process after some of them."""

    def __init__(self, engine: TargetEngine, stop_after: int | None = None) -> None:
        self.name = engine.name
        self.calls: list[tuple[list[list[int]], Sampling]] = []
        self._engine = engine
        self._stop_after = stop_after

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        if len(self.calls) == self._stop_after:
            raise KeyboardInterrupt
        self.calls.append(([list(prompt) for prompt in prompts], sampling))
        return self._engine.generate(prompts, sampling)

    def states(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        raise AssertionError("the corpus needs no states")


class SilentReporter:
    """Keeps what was reported."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, int, int, str]] = []

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        self.reported.append((label, done, total, unit))

    def metrics(self, values, step) -> None:
        raise AssertionError("the corpus has no curve")


@pytest.fixture
def target(
    tiny_target_params: TargetParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TargetModel:
    """The tiny target in data/target of a project folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return bring_target(tiny_target_params, TargetModel.home)


@pytest.fixture
def engine(target: TargetModel, tiny_target_params: TargetParams) -> TransformersEngine:
    return TransformersEngine(target, tiny_target_params)


@pytest.fixture
def counted(engine: TransformersEngine):
    """Make an engine that counts its calls, and maybe stops."""
    return lambda stop_after=None: CountedEngine(engine, stop_after)


@pytest.fixture
def report() -> SilentReporter:
    return SilentReporter()
