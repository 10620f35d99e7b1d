"""A reporter that keeps what a stage says of its progress."""

from collections.abc import Mapping


class Listener:
    """For stages without a curve."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        self.steps.append((done, total))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        raise AssertionError("extraction has no curve")
