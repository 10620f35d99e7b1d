"""A tiny project up to its drafters, for a real vLLM to serve; run by `make test-engine`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from servable_target import HEAD_DIM, servable_target
from tiny_params import jsonl_source, tiny_params_tree
from tiny_pipeline import make_inputs, train

from eagle3.artifacts import Corpus, Drafter, DraftVocab, HiddenStates, TargetModel
from eagle3.config import Params, TargetParams, VocabSize, check_params
from eagle3.engines.server import find_engine
from eagle3.errors import EngineError
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
    params: Params


@pytest.fixture(scope="session")
def project(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("project"))
        yield build_project(tiny_target)


def build_project(tiny_target: Path) -> Project:
    params = project_params(servable_target(tiny_target, Path("model")))
    inputs = make_inputs(params, SIZES[0])
    drafters = {}
    for size in SIZES:
        home = DraftVocab.home(size)
        vocab = select_vocab(inputs.target, inputs.corpus, params.vocab, size, None, home)
        # One of the two with the norms of EAGLE-3.1, so that vLLM serves both networks.
        norms = {"fc_norm": size == "full", "norm_output": size == "full"}
        drafter = params.drafter.model_copy(update=norms)
        chosen = params.model_copy(update={"drafter": drafter})
        drafters[size] = train(replace(inputs, vocab=vocab), chosen)
    return Project(params.target, inputs.target, inputs.corpus, inputs.states, drafters, params)


def project_params(target: Path) -> Params:
    """The tiny pipeline, trained until vLLM accepts some of what is drafted."""
    chats, held_out = Path("chats.jsonl"), Path("held-out.jsonl")
    prompts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    chats.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    # Long common beginnings: what a prefix cache would cut states short by.
    held_out.write_text(
        "".join(
            json.dumps({"prompt": f"Once upon a time there was a lamp by the sea and {end}"}) + "\n"
            for end in ("a fox", "a clock", "tea", "the moon", "a tree", "rain", "a road", "snow")
        )
    )
    raw = tiny_params_tree(target)
    raw["corpus"] |= {
        "sources": [
            jsonl_source(chats, "chat", "by-hash"),
            jsonl_source(held_out, "held-out", "eval"),
        ],
        "max_length": 192,
        "validation_fraction": 0.1,
        "eval_fraction": 0.3,
    }
    raw["corpus"]["answers"] |= {"temperature": 0.0, "max_new_tokens": 48, "batch_size": 16}
    raw["extract"] |= {"state_dtype": "float32"}
    raw["vocab"]["sizes"] = list(SIZES)
    raw["drafter"]["head_dim"] = HEAD_DIM
    raw["train"] |= {
        "ttt_steps": 3,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "total_steps": 60,
        "batch_tokens": 1024,
        "validate_every": 30,
    }
    return check_params(raw, "engine tests")
