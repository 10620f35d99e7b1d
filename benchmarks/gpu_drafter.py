"""A drafter on one GPU from nothing but a target: its own questions, answers, states, training.

    python benchmarks/gpu_drafter.py PROJECT answers 32000 full --target FOLDER --bench FOLDER
    python benchmarks/gpu_drafter.py PROJECT states 32000 full
    python benchmarks/gpu_drafter.py PROJECT train 32000 full
    python benchmarks/gpu_drafter.py PROJECT evaluate 32000 full

The stages of the pipeline without DVC, Prefect and MLflow, for a machine that has none of them,
over SmolLM2-135M-Instruct and the params of presets/smollm2-135m.yaml changed as `SETTINGS` says.
The target is asked by itself: it writes the user's turn of a chat under each of some system
prompts (Magpie, arXiv 2406.08464), and what it asked is then answered under its usual one; a file
PROJECT/questions.jsonl that is there stands for its questions. `--engine vllm` writes text by vLLM
in this process; states come from transformers. Held out are the public benchmarks of --bench, none
of whose prompts is trained on. Each step says what it did in one line of JSON, which is also added
to PROJECT/figures.jsonl.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from eagle3.artifacts import Corpus, Drafter, DraftVocab, Evaluation, HiddenStates, TargetModel
from eagle3.config import PARAMS_FILE, Params, load_params, parse_size
from eagle3.corpus.build import build_corpus
from eagle3.corpus.template import ChatTemplate
from eagle3.engines.base import Sampling, TextEngine
from eagle3.engines.transformers import TransformersEngine
from eagle3.evaluate import evaluate_drafter
from eagle3.extract import extract_hidden_states
from eagle3.progress import ConsoleReporter
from eagle3.target import bring_target, end_token_ids, load_tokenizer
from eagle3.train import train_drafter
from eagle3.vocab import select_vocab

PRESET = Path(__file__).parents[1] / "presets" / "smollm2-135m.yaml"
FIGURES = Path("figures.jsonl")
QUESTIONS = Path("questions.jsonl")

SETTINGS: dict[str, dict[str, Any]] = {
    "target": {"dtype": "bfloat16"},
    "corpus": {"max_length": 1024, "validation_fraction": 0.002, "eval_fraction": 0.0},
    "extract": {"shard_tokens": 65536, "chunk_tokens": 256},
    "drafter": {"intermediate_size": 6144, "fc_norm": True},
    "train": {
        "ttt_steps": 4,
        "learning_rate": 2.0e-3,
        "warmup_steps": 150,
        "min_learning_rate_ratio": 0.02,
        "total_steps": 4600,
        "batch_tokens": 16384,
        "log_every": 100,
        "validate_every": 920,
        "dtype": "bfloat16",
    },
    "evaluate": {"loop_prompts": 1},
}

# An equal share of the questions each; None is the target's own system prompt.
ASKED_AS = (
    None,
    "You are a helpful assistant that solves math word problems step by step.",
    "You are a coding assistant. The user asks you to write Python functions.",
    "You complete Python functions from their signature and docstring.",
    "You are a creative writer. The user asks for stories, poems, letters and role play.",
    "You explain concepts of science, history and the humanities to a curious user.",
    "You help with reasoning puzzles, extraction of facts from a text, and summaries.",
)
QUESTION_TOKENS = 128
ANSWER_TOKENS = 512
TEMPERATURE = 0.3
"""Of training answers: near the greedy text on which acceptance is measured."""


def note(what: str, started: float, **figures: Any) -> None:
    """Say and keep what a step did."""
    line = json.dumps({"what": what, "seconds": round(time.monotonic() - started, 1), **figures})
    print(line, flush=True)
    with FIGURES.open("a") as file:
        file.write(line + "\n")


def write_params(args: argparse.Namespace, benches: Sequence[Path]) -> Params:
    """PROJECT/params.yaml: the preset, changed."""
    raw = yaml.safe_load(PRESET.read_text())
    for section, values in SETTINGS.items():
        raw[section] |= values
    config = json.loads((args.target / "config.json").read_text())
    raw["target"] |= {"source": str(args.target)}
    raw["target"]["shape"] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
    }
    asked = {"kind": "jsonl", "path": str(QUESTIONS), "domain": "self", "split": "by-hash"}
    held_out = [
        {"kind": "jsonl", "path": f"{path.stem}.jsonl", "domain": path.stem, "split": "eval"}
        for path in benches
    ]
    raw["corpus"]["sources"] = [source | {"limit": None} for source in (asked, *held_out)]
    raw["corpus"]["answers"] |= {
        "max_new_tokens": args.answer_tokens,
        "batch_size": args.batch,
        "temperature": TEMPERATURE,
    }
    raw["vocab"]["sizes"] = [parse_size(size) for size in args.sizes]
    if args.device == "cpu":
        raw["train"]["dtype"] = raw["target"]["dtype"] = "float32"
    Path(PARAMS_FILE).write_text(yaml.safe_dump(raw))
    return load_params()


def hold_out(bench: Path) -> None:
    """A benchmark's questions as chats; answers stand for a turn only, the target gives its own."""
    chats = []
    for line in bench.read_text().splitlines():
        turns = json.loads(line)["turns"]
        messages = [{"role": "user", "content": turns[0]}]
        for turn in turns[1:]:
            messages += [{"role": "assistant", "content": "-"}, {"role": "user", "content": turn}]
        chats.append(json.dumps({"messages": messages}))
    Path(f"{bench.stem}.jsonl").write_text("\n".join(chats) + "\n")


def ask(target: TargetModel, engine: TextEngine, count: int, batch: int) -> int:
    """Let the target write questions into a file; how many came to an end and are new."""
    template = ChatTemplate(load_tokenizer(target), ends := end_token_ids(target))
    mark = "Q7QUESTIONQ7"
    questions: dict[str, None] = {}
    for place, system in enumerate(ASKED_AS):
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": mark})
        text = load_tokenizer(target).apply_chat_template(turns, tokenize=False)
        prompt = template.encode(text.partition(mark)[0])
        for call in range(-(-count // len(ASKED_AS) // batch)):
            sampling = Sampling(1.0, 1.0, QUESTION_TOKENS, place * 1000 + call)
            for answer in engine.generate([prompt] * batch, sampling):
                if answer and answer[-1] in ends and len(answer) > 4:
                    questions[template.decode(answer[:-1]).strip()] = None
    lines = [json.dumps({"prompt": question}) for question in questions if question]
    QUESTIONS.write_text("\n".join(lines) + "\n")
    return len(lines)


def text_engine(args: argparse.Namespace, target: TargetModel, params: Params) -> TextEngine:
    """Who writes the questions and answers."""
    if args.engine == "transformers":
        return TransformersEngine(target, params.target)
    from gpu_vllm import OfflineVllm

    longest = params.corpus.max_length + args.answer_tokens
    ends, dtype = end_token_ids(target), params.target.dtype
    return OfflineVllm(TargetModel.home.resolve(), ends, longest, dtype)


def answers(args: argparse.Namespace) -> None:
    """Questions and what the target says to them."""
    benches = sorted(args.bench.glob("*.jsonl"))
    params = write_params(args, benches)
    for bench in benches:
        hold_out(bench)
    started = time.monotonic()
    target = bring_target(params.target, TargetModel.home)
    engine = text_engine(args, target, params)
    note("engine", started, name=engine.name)
    if not QUESTIONS.exists():
        started = time.monotonic()
        asked = ask(target, engine, args.questions, args.batch)
        note("questions", started, wanted=args.questions, new=asked)
    started = time.monotonic()
    corpus = build_corpus(target, params.corpus, engine, Corpus.home, ConsoleReporter())
    answered = sum(corpus.supervised_tokens.values())
    note(
        "answers", started, rows=corpus.rows, tokens=corpus.tokens,
        answer_tokens=corpus.supervised_tokens,
        answer_tokens_per_s=answered / (time.monotonic() - started),
    )  # fmt: skip


def states(args: argparse.Namespace) -> None:
    """What training reads: states and draft vocabularies."""
    params = load_params()
    target, corpus = TargetModel.load(TargetModel.home), Corpus.load(Corpus.home)
    engine = TransformersEngine(target, params.target)
    started = time.monotonic()
    stored = extract_hidden_states(
        target, corpus, params.extract, engine, HiddenStates.home, ConsoleReporter()
    )
    tokens = sum(stored.tokens.values())
    note(
        "states", started, tokens=tokens, ratio=stored.ratio,
        tokens_per_s=tokens / (time.monotonic() - started),
    )  # fmt: skip
    for name in args.sizes:
        size = parse_size(name)
        vocab = select_vocab(target, corpus, params.vocab, size, None, DraftVocab.home(size))
        note(f"vocab@{size}", started, draft_vocab=vocab.draft_vocab)


def made() -> tuple[TargetModel, Corpus, HiddenStates]:
    """What `states` has left."""
    return (
        TargetModel.load(TargetModel.home),
        Corpus.load(Corpus.home),
        HiddenStates.load(HiddenStates.home),
    )


class Figures(ConsoleReporter):
    """Progress as ever, and the figures of training kept."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def metrics(self, values: Any, step: int) -> None:
        """Keep the newest of each."""
        super().metrics(values, step)
        self.last |= dict(values)
        print(step, {key: round(value, 4) for key, value in values.items()}, flush=True)


def train(args: argparse.Namespace) -> None:
    """Train the drafter of each size."""
    params = load_params()
    for name in args.sizes:
        size = parse_size(name)
        report, started = Figures(), time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        drafter = train_drafter(
            *made(),
            DraftVocab.load(DraftVocab.home(size)),
            params.drafter,
            params.train,
            Drafter.home(size),
            report,
        )
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        note(
            f"train@{size}", started, best_step=drafter.best_step,
            acceptance_length_validation_k3=drafter.acceptance_length_validation,
            trainable=drafter.trainable_parameters, peak_gib=peak, **report.last,
        )  # fmt: skip


def evaluate(args: argparse.Namespace) -> None:
    """Acceptance of each size on what was held out."""
    params = load_params()
    for name in args.sizes:
        size, started = parse_size(name), time.monotonic()
        evaluate_drafter(
            *made(),
            Drafter.load(Drafter.home(size)),
            params.evaluate,
            params.target,
            Evaluation.home(size),
            ConsoleReporter(),
        )
        details = json.loads((Evaluation.home(size) / "evaluation.json").read_text())
        note(f"evaluate@{size}", started, **details)


def main() -> None:
    """Run one step in the project's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("step", choices=("answers", "states", "train", "evaluate"))
    parser.add_argument("sizes", nargs="+", help="draft vocabularies: numbers of tokens, or full")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder")
    parser.add_argument("--bench", type=Path, help="folder of held-out questions, *.jsonl")
    parser.add_argument("--questions", type=int, default=24576, help="to ask the target for")
    parser.add_argument("--batch", type=int, default=1024, help="answers written at a time")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--answer-tokens", type=int, default=ANSWER_TOKENS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    for name in ("target", "bench"):
        if getattr(args, name):
            setattr(args, name, getattr(args, name).resolve())
    args.project.mkdir(parents=True, exist_ok=True)
    os.chdir(args.project)
    print(" ".join(["python benchmarks/gpu_drafter.py", *sys.argv[1:]]), flush=True)
    steps = {"answers": answers, "states": states, "train": train, "evaluate": evaluate}
    steps[args.step](args)


if __name__ == "__main__":
    main()
