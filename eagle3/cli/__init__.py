"""The command `eagle3`: one module per command, exit codes 0 (yes), 1 (no) and 2 (bad input)."""

from eagle3.cli.app import main

__all__ = ["main"]
