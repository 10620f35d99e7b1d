"""What hidden states take: as a reader gets them, and at rest."""

from eagle3.config import StateDtype

READ_BYTES: dict[StateDtype, int] = {"float32": 4, "bfloat16": 2, "float8": 2}
"""Of one value, read; float8 is read as bfloat16."""

EXPECTED_RATIO: dict[StateDtype, float] = {"bfloat16": 0.70, "float32": 0.85, "float8": 0.45}
"""Bytes at rest over bytes read: a little above what SmolLM2's take in chunks of 64 tokens."""
