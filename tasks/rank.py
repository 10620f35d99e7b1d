"""Whether this process leads a stage, or helps another process that does (torchrun's RANK)."""

import os

RANK = int(os.environ.get("RANK", "0"))
HELPS = RANK > 0
"""A helper computes and nothing else: no MLflow, no Prefect, no results."""
