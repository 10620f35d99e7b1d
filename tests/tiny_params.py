"""params.yaml cut down to a tiny target and a pipeline of seconds."""

import json
from pathlib import Path
from typing import Any

from raw_params import raw_params


def tiny_params_tree(target: Path) -> dict[str, Any]:
    """All of params.yaml for the tiny target of `target`, but for corpus.sources."""
    raw = raw_params()
    config = json.loads((target / "config.json").read_text())
    raw["target"] = {
        "source": str(target),
        "shape": {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "vocab_size": config["vocab_size"],
        },
        "aux_layers": "default",
        "weights": "copy",
        "trust_remote_code": False,
        "dtype": "float32",
        "device": "cpu",
    }
    raw["corpus"] |= {
        "max_length": 128,
        "validation_fraction": 0.2,
        "eval_fraction": 0.2,
    }
    raw["corpus"]["answers"] |= {"max_new_tokens": 12, "batch_size": 8}
    raw["extract"] |= {"chunk_tokens": 64, "shard_tokens": 256}
    raw["vocab"] |= {"sizes": [128, "full"]}
    raw["drafter"] |= {
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    raw["train"] |= {
        "ttt_steps": 2,
        "warmup_steps": 1,
        "total_steps": 6,
        "batch_tokens": 256,
        "validate_every": 3,
        "device": "cpu",
    }
    raw["evaluate"] |= {
        "draft_tokens": [1, 3],
        "loop_draft_tokens": 3,
        "loop_prompts": 2,
        "timing_repeats": 2,
        "device": "cpu",
    }
    return raw


def jsonl_source(path: Path, domain: str, split: str) -> dict[str, Any]:
    """An entry of corpus.sources."""
    return {"kind": "jsonl", "path": str(path), "domain": domain, "split": split, "limit": None}
