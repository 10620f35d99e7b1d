"""A project with the shipped code, dvc.yaml and settings, scaled down, for a real `dvc repro`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def plain_environment() -> dict[str, str]:
    """The environment of `dvc repro` on a laptop: no servers named."""
    names = ("PREFECT_", "MLFLOW_", "EAGLE3_", "DVC_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return kept | {
        "PATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Chain:
    """The whole pipeline, scaled down to a random target, in a folder of its own."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = environ

    def run(self, *command: str, environ: dict[str, str] | None = None) -> Any:
        """Run a command there, with no servers named unless `environ` does; it must succeed."""
        environ = self.environ if environ is None else environ | {"DVC_ROOT": str(self.folder)}
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def repro(self) -> list[str]:
        """Names of the stages that `dvc repro` ran, in order."""
        output = self.run("dvc", "repro").stdout
        return re.findall(r"^Running stage '(.*)':$", output, re.MULTILINE)

    def change(self, section: str, **values: Any) -> None:
        """Set values in a section of params.yaml."""
        params = self.folder / "params.yaml"
        tree = yaml.safe_load(params.read_text())
        tree[section] |= values
        params.write_text(yaml.safe_dump(tree, sort_keys=False))


SUBJECTS = ["the sea", "a tree", "our street", "the moon", "a clock", "the river", "a fox", "tea"]
QUESTIONS = ["What is {} like?", "Tell me of {}.", "Why do people like {}?", "How old is {}?"]


def scale_down(params: dict[str, Any], target: Path) -> dict[str, Any]:
    """The shipped params, for a target and a corpus that take seconds."""
    source = {"kind": "jsonl", "split": "by-hash", "limit": None}
    params["target"] |= {
        "source": str(target),
        "shape": {"num_layers": 8, "hidden_size": 32, "vocab_size": 320},
        "device": "cpu",
    }
    params["corpus"] |= {
        "sources": [source | {"path": "chats/chats.jsonl", "domain": "chat"}],
        "max_length": 96,
        "validation_fraction": 0.2,
        "eval_fraction": 0.2,
    }
    params["corpus"]["answers"] |= {"max_new_tokens": 12, "batch_size": 8}
    params["extract"] |= {"chunk_tokens": 64, "shard_tokens": 256}
    params["vocab"] |= {"sizes": ["full"]}
    params["drafter"] |= {
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    params["train"] |= {
        "learning_rate": 2.0e-3,
        "ttt_steps": 2,
        "warmup_steps": 1,
        "total_steps": 6,
        "batch_tokens": 256,
        "validate_every": 3,
    }
    params["evaluate"] |= {"draft_tokens": [1, 3], "loop_prompts": 1, "timing_repeats": 3}
    return params


def make_chain(folder: Path, params: dict[str, Any], environ: dict[str, str]) -> Chain:
    """Such a project in a folder, committed; nothing has run yet."""
    for name in ("eagle3", "tasks", "flows"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    chats = [q.format(subject) for subject in SUBJECTS for q in QUESTIONS]
    (folder / "chats").mkdir()
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chats)
    (folder / "chats" / "chats.jsonl").write_text(lines)
    chain = Chain(folder, environ)
    chain.run("git", "init", "-q")
    chain.run("dvc", "init", "-q")
    shutil.copytree(ROOT / ".dvc" / "plots", folder / ".dvc" / "plots")
    shutil.copy(ROOT / ".dvc" / "config", folder / ".dvc" / "config")
    chain.run("git", "add", "--all")
    author = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    chain.run("git", *author, "commit", "-qm", "a tiny project")
    return chain
