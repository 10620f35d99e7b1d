"""Reporters that keep what a stage says of its progress, or end it there."""

from collections.abc import Mapping

from eagle3.progress import ConsoleReporter


class Listener:
    """For stages without a curve."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        self.steps.append((done, total))

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        raise AssertionError("extraction has no curve")


class StopAt(ConsoleReporter):
    """Ends training at a step, as a signal's handler does: with an exception out of nowhere."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.stop = step

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        if label == "training" and done == self.stop:
            raise KeyboardInterrupt
