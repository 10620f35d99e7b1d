"""A tiny project up to its drafters, for a real vLLM to serve; run by `make test-engine`."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import (
    CorpusParams,
    DrafterParams,
    ExtractParams,
    TargetParams,
    TrainParams,
    VocabParams,
    VocabSize,
)
from eagle3.corpus import build_corpus
from eagle3.engines.server import find_engine
from eagle3.engines.transformers import TransformersEngine
from eagle3.errors import EngineError
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.target import bring_target
from eagle3.train import train_drafter
from eagle3.vocab import select_vocab

SIZES: tuple[VocabSize, ...] = (128, "full")
SUBJECTS = ["the sea", "a tree", "our street", "the moon", "a clock", "the river", "a fox", "tea"]
QUESTIONS = ["What is {} like?", "Tell me of {}.", "How old is {}?", "Who knows {}?", "Is {} old?"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs vLLM, saying why, unless it is asked for and there."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = None
    if "engine" not in (config.getoption("markexpr") or ""):
        reason = "minutes with a real vLLM; run `make test-engine`"
    else:
        try:
            find_engine()
        except EngineError as error:
            reason = str(error)
    for item in here:
        item.add_marker(pytest.mark.engine)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Project:
    """The records of a tiny pipeline, whose folders lie below the current directory."""

    target_params: TargetParams
    target: TargetModel
    corpus: Corpus
    states: HiddenStates
    drafters: dict[VocabSize, Drafter]


@pytest.fixture(scope="session")
def project(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("project"))
        yield build_project(tiny_target)


def build_project(tiny_target: Path) -> Project:
    report = ConsoleReporter()
    params = target_params(servable_target(tiny_target, Path("model")))
    target = bring_target(params, TargetModel.home)
    engine = TransformersEngine(target, params)
    corpus = build_corpus(target, corpus_params(), engine, Corpus.home, report)
    states = extract_hidden_states(
        target, corpus, extract_params(), engine, HiddenStates.home, report
    )
    vocab_params = VocabParams(sizes=SIZES, keep_special=True, keep_tokens=())
    drafters = {}
    for size in SIZES:
        vocab = select_vocab(target, corpus, vocab_params, size, None, DraftVocab.home(size))
        drafters[size] = train_drafter(
            target,
            corpus,
            states,
            vocab,
            drafter_params(),
            train_params(),
            Drafter.home(size),
            report,
        )
    return Project(params, target, corpus, states, drafters)


def servable_target(tiny_target: Path, folder: Path) -> Path:
    """The tiny target with heads as wide as vLLM's CPU attention knows them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny_target, folder)
    config = LlamaConfig.from_pretrained(folder)
    config.head_dim = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def target_params(folder: Path) -> TargetParams:
    config = json.loads((folder / "config.json").read_text())
    return TargetParams.model_validate(
        {
            "source": str(folder),
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
    )


def corpus_params() -> CorpusParams:
    chats = Path("chats.jsonl")
    prompts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    chats.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    held_out = Path("held-out.jsonl")
    # Long common beginnings: what a prefix cache would cut states short by.
    held_out.write_text(
        "".join(
            json.dumps({"prompt": f"Once upon a time there was a lamp by the sea and {end}"}) + "\n"
            for end in ("a fox", "a clock", "tea", "the moon", "a tree", "rain", "a road", "snow")
        )
    )
    return CorpusParams.model_validate(
        {
            "sources": [
                {
                    "kind": "jsonl",
                    "path": str(path),
                    "domain": domain,
                    "split": split,
                    "limit": None,
                }
                for path, domain, split in (
                    (chats, "chat", "by-hash"),
                    (held_out, "held-out", "eval"),
                )
            ],
            "answers": {
                "backend": "transformers",
                "by": "target",
                "temperature": 0.0,
                "top_p": 1.0,
                "max_new_tokens": 48,
                "seed": 0,
                "batch_size": 16,
            },
            "max_length": 192,
            "max_malformed": 0,
            "validation_fraction": 0.1,
            "eval_fraction": 0.3,
        }
    )


def extract_params() -> ExtractParams:
    return ExtractParams(
        backend="transformers",
        state_dtype="float32",
        eval_state_dtype="float32",
        chunk_tokens=64,
        shard_tokens=512,
        workers=1,
        ray_address=None,
    )


def drafter_params() -> DrafterParams:
    return DrafterParams(
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=512,
    )


def train_params() -> TrainParams:
    return TrainParams.model_validate(
        {
            "ttt_steps": 3,
            "step_decay": 0.8,
            "head_init": "target",
            "learning_rate": 3e-3,
            "warmup_steps": 5,
            "min_learning_rate_ratio": 0.1,
            "total_steps": 60,
            "batch_tokens": 1024,
            "accumulate": 1,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.95,
            "max_grad_norm": 1.0,
            "log_every": 30,
            "validate_every": 30,
            "validate_draft_tokens": 3,
            "seed": 0,
            "dtype": "float32",
            "device": "cpu",
        }
    )
