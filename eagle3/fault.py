"""One fault of a checkpoint, as a record: where it is, what it is, what mends it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A line of the contract that a folder breaks."""

    where: str
    """File and, within it, key or tensor."""
    what: str
    fix: str

    def __str__(self) -> str:
        """The fault on one line."""
        return f"{self.where} {self.what}; {self.fix}"
