"""What vLLM reports for drafters that are broken in ways it does not notice: why the check exists.

    make demo engine
    python benchmarks/silent_mutations.py 32000 > benchmarks/results/silent_mutations.json

Run it in a project whose drafter is trained. Each damage is put into a copy of the drafter; `eagle3
check` must name it, and vLLM then serves the copy for greedy answers to eval rows. One JSON record
per damage: what the check says, whether the server starts, and the acceptance length it counts.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.artifacts import Corpus, Drafter, TargetModel
from eagle3.check import check_drafter
from eagle3.config import parse_size
from eagle3.contract import CONFIG_FILE, LAYER_IDS, NESTED, WEIGHTS_FILE
from eagle3.engines.base import Sampling
from eagle3.engines.served import Asked
from eagle3.engines.server import EngineInstall, find_engine, running_server
from eagle3.engines.vllm_server import ServerOptions, VllmClient, server_arguments, with_drafter
from eagle3.errors import EngineError
from eagle3.serve import eval_turns
from eagle3.served_figures import Turn
from eagle3.store.rows import load_rows
from eagle3.target import end_token_ids
from eagle3.target.folder import trusted_folder

K = 3
PROMPTS = 1
"""Eval rows of each domain: a broken drafter is told from a sound one by a few."""

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Damage = Callable[[Tensors, Config], object]


def fresh(name: str) -> Damage:
    """Weights as an untrained layer has them."""

    def damage(tensors: Tensors, _config: Config) -> None:
        torch.manual_seed(0)
        tensors[name] = torch.empty_like(tensors[name], dtype=torch.float32).normal_(0, 0.02)
        tensors[name] = tensors[name].bfloat16()

    return damage


def zeroed(name: str) -> Damage:
    """Weights that were never filled."""
    return lambda tensors, _config: tensors[name].zero_()


def dropped(*names: str) -> Damage:
    """Tensors that a rename lost."""
    return lambda tensors, _config: [tensors.pop(name) for name in names]


def absolute_maps(tensors: Tensors, _config: Config) -> None:
    """Target ids where offsets belong."""
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def shifted_maps(tensors: Tensors, _config: Config) -> None:
    """Every draft id means the token after its own."""
    vocab, drafted = len(tensors["t2d"]), len(tensors["d2t"])
    ids = (tensors["d2t"] + torch.arange(drafted) + 1).clamp(max=vocab - 1)
    tensors["d2t"] = ids - torch.arange(drafted)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)


def layer_ids(shift: int) -> Damage:
    """Ids in another trainer's convention."""

    def damage(_tensors: Tensors, config: Config) -> None:
        ids = [layer + shift for layer in config[LAYER_IDS]]
        config[LAYER_IDS] = config[NESTED][LAYER_IDS] = ids

    return damage


def reversed_layers(_tensors: Tensors, config: Config) -> None:
    """The right layers in the wrong order, which `fc` cannot know."""
    ids = config[LAYER_IDS][::-1]
    config[LAYER_IDS] = config[NESTED][LAYER_IDS] = ids


def legacy_rope_only(_tensors: Tensors, config: Config) -> None:
    """The new spelling says what no longer holds: an edit of `rope_theta` alone."""
    config["rope_parameters"]["rope_theta"] = 1e2


def key(name: str, value: object) -> Damage:
    """One key of config.json with another value."""
    return lambda _tensors, config: config.update({name: value})


DAMAGES: dict[str, Damage] = {
    "none": lambda _tensors, _config: None,
    "head missing": dropped("lm_head.weight"),
    "fc missing": dropped("fc.weight"),
    "final norm missing": dropped("norm.weight"),
    "d2t missing": dropped("d2t"),
    "d2t holds target ids": absolute_maps,
    "d2t and t2d one id up": shifted_maps,
    "head fresh": fresh("lm_head.weight"),
    "head zero": zeroed("lm_head.weight"),
    "o_proj zero": zeroed("midlayer.self_attn.o_proj.weight"),
    "layer ids one down": layer_ids(-1),
    "layer ids one up": layer_ids(+1),
    "layer ids reversed": reversed_layers,
    "rope_theta in one spelling": legacy_rope_only,
    "tie_word_embeddings": key("tie_word_embeddings", True),
}


def damaged(source: Path, damage: Damage, out: Path) -> Path:
    """Write a copy of the drafter with the damage done."""
    tensors = load_file(source / WEIGHTS_FILE)
    config = json.loads((source / CONFIG_FILE).read_text())
    damage(tensors, config)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / WEIGHTS_FILE)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return out


def serve(folder: Path, target: TargetModel, turns: list[Turn], engine: EngineInstall) -> Any:
    """The acceptance length that vLLM counts, or why its server did not start."""
    options = ServerOptions(
        target=trusted_folder(target, TargetModel.home),
        trust_remote_code=target.trust_remote_code,
        dtype="float32",
        max_length=max(len(turn.prompt) + turn.limit for turn in turns) + K + 1,
        at_once=1,
        speculation=with_drafter(folder, K, engine),
        states_folder=None,
    )
    arguments = server_arguments(options, engine)
    asked = [Asked(turn.prompt, Sampling(0.0, 1.0, turn.limit, 0)) for turn in turns]
    try:
        with running_server(engine, arguments, folder.with_suffix(".log")) as http:
            served = VllmClient(http, end_token_ids(target)).run(asked, at_once=1)
    except EngineError as error:
        return {"starts": False, "error": str(error).splitlines()[0]}
    same = sum(
        answer == turn.stored for answer, turn in zip(served.answers, turns, strict=True)
    ) / len(turns)
    return {
        "starts": True,
        "acceptance_length": round(served.counters.acceptance_length, 4),
        "answers_unchanged": same,
    }


def main() -> None:
    """Serve every damage in turn; progress goes to stderr."""
    size = parse_size(sys.argv[1])
    target, engine = TargetModel.load(TargetModel.home), find_engine()
    turns = eval_turns(load_rows(Corpus.home / "eval.zarr"), PROMPTS)
    records = []
    with tempfile.TemporaryDirectory(prefix="silent-mutations-") as scratch:
        for name, damage in DAMAGES.items():
            folder = damaged(Drafter.home(size), damage, Path(scratch) / "drafter")
            faults = check_drafter(folder, TargetModel.home)
            assert bool(faults) == (name != "none"), f"{name}: {faults}"
            record = {"damage": name, "check": [str(fault) for fault in faults]}
            record |= serve(folder, target, turns, engine)
            print(record, file=sys.stderr, flush=True)
            records.append(record)
    about = {
        "engine": f"{engine.package} {engine.version}",
        "dtype": "float32",
        "draft_tokens": K,
        "draft_vocab": str(size),
        "prompts": len(turns),
        "command": f"python benchmarks/silent_mutations.py {size}",
        "date": date.today().isoformat(),
    }
    print(json.dumps({**about, "records": records}, indent=2))


if __name__ == "__main__":
    main()
