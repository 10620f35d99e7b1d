"""What capturing states while the target answers saves: corpus and extract, with and without.

    python benchmarks/capture_answers.py --project . --prompts 40

On the first prompts of a project's own sources, in turn, several times, each time from nothing: the
corpus stage and the extract stage, as params.yaml has them, with `extract.capture_answers` false
and true. Seconds of wall and of processor time are kept for each; the corpora must be equal. The
states of both ways are compared value by value, as they are stored: `off_by` is the largest
difference in a state as a share of the largest value in that state, `differ` the share of values
that are not the same bits.

Shapes: n tokens of a split, T tokens of a row, H target width.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from store_results import keep
from torch import Tensor

from eagle3.artifacts import SPLITS, Corpus, HiddenStates, TargetModel
from eagle3.captured.take import captured_first
from eagle3.config import Params, load_params
from eagle3.corpus.build import build_corpus
from eagle3.corpus.capture import AnswerCapture
from eagle3.engines.transformers import TransformersEngine
from eagle3.extract import extract_hidden_states
from eagle3.progress import SilentReporter
from eagle3.store.states import StateStore
from eagle3.work import WORK

WAYS = ("apart", "captured")


def first_prompts(params: Params, count: int) -> Params:
    """The params with so many conversations, from all sources by turns."""
    share = -(-count // len(params.corpus.sources))
    sources = tuple(source.model_copy(update={"limit": share}) for source in params.corpus.sources)
    corpus = params.corpus.model_copy(update={"sources": sources})
    return params.model_copy(update={"corpus": corpus})


def timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What the work gives, with its seconds of wall and processor time."""
    started, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - started, time.process_time() - cpu)


def run(
    way: str, target: TargetModel, params: Params, engine: TransformersEngine
) -> tuple[Corpus, dict[str, tuple[float, float]], int]:
    """Both stages from nothing: the corpus, the seconds, and bytes that waited between them."""
    for place in (Corpus.home, HiddenStates.home, WORK):
        shutil.rmtree(place, ignore_errors=True)
    captures = way == "captured"
    extract = params.extract.model_copy(update={"capture_answers": captures})
    report = SilentReporter()
    capture = None
    if captures:
        capture = AnswerCapture(target, engine, extract, params.corpus.max_length)
    corpus, corpus_seconds = timed(
        lambda: build_corpus(target, params.corpus, engine, Corpus.home, report, capture)
    )
    waited = sum(path.stat().st_size for path in WORK.rglob("*") if path.is_file())

    def extracted() -> HiddenStates:
        if not captures:
            return extract_hidden_states(target, corpus, extract, engine, HiddenStates.home, report)
        with captured_first(target, engine, extract) as either:
            return extract_hidden_states(target, corpus, extract, either, HiddenStates.home, report)

    _, extract_seconds = timed(extracted)
    return corpus, {"corpus": corpus_seconds, "extract": extract_seconds}, waited


def compared(one: Path, other: Path) -> dict[str, Any]:
    """The states of two stores of the same rows."""
    stores = StateStore.open(one), StateStore.open(other)
    rows = stores[0].rows
    worst, differing, count = 0.0, 0, 0
    for row in range(len(rows)):
        span = rows.span(row)
        pairs = zip(*(store.read(span.start, span.stop) for store in stores), strict=True)
        for mine, theirs in pairs:
            worst = max(worst, off_by(mine, theirs))
            differing += int((mine != theirs).sum())
            count += mine.numel()
    dtype = stores[0].header.dtype
    return {"dtype": dtype, "off_by": worst, "differ": round(differing / count, 4)}


def off_by(mine_TH: Tensor, theirs_TH: Tensor) -> float:
    """Largest difference as a share of the largest value of its state; any axes before H."""
    largest = theirs_TH.float().abs().amax(dim=-1, keepdim=True)
    return float(((mine_TH.float() - theirs_TH.float()).abs() / largest).max())


def main() -> None:
    """Both ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, required=True, help="With its target brought.")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    project, repository = args.project.resolve(), Path.cwd()
    params = first_prompts(load_params(repository / "params.yaml"), args.prompts)
    home = project / TargetModel.home
    target = TargetModel.load(home)
    engine = TransformersEngine(target, params.target, home)
    seconds: dict[str, list[dict[str, tuple[float, float]]]] = {way: [] for way in WAYS}
    waited = 0
    with TemporaryDirectory(prefix="capture-answers-") as name:
        os.chdir(name)
        TargetModel.home.parent.mkdir()
        TargetModel.home.symlink_to(home)
        corpora = {}
        for _ in range(args.repeats):
            for way in WAYS:
                corpora[way], found, waited = run(way, target, params, engine)
                seconds[way].append(found)
                shutil.rmtree(way, ignore_errors=True)
                HiddenStates.home.rename(way)
        assert corpora["apart"].sha256 == corpora["captured"].sha256, "another corpus"
        states = {
            split: compared(Path("apart") / f"{split}.zarr", Path("captured") / f"{split}.zarr")
            for split in SPLITS
        }
        stored = HiddenStates.load(Path("captured"))
        os.chdir(repository)

    def middle(way: str, stages: tuple[str, ...], clock: int) -> float:
        found = seconds[way]
        return statistics.median(sum(each[stage][clock] for stage in stages) for each in found)

    both = ("corpus", "extract")
    corpus = corpora["captured"]
    keep(
        "capture_answers",
        "smollm2",
        {
            "target": target.source,
            "engine": engine.name,
            "threads": torch.get_num_threads(),
            "rows": sum(corpus.rows.values()),
            "tokens": sum(corpus.tokens.values()),
            "answer_tokens": sum(corpus.supervised_tokens.values()),
            "seconds_wall_cpu": {
                way: [
                    {stage: [round(clock, 1) for clock in each[stage]] for stage in both}
                    for each in found
                ]
                for way, found in seconds.items()
            },
            "extract_captured_over_apart": [
                round(
                    middle("captured", ("extract",), clock) / middle("apart", ("extract",), clock),
                    3,
                )
                for clock in (0, 1)
            ],
            "both_captured_over_apart": [
                round(middle("captured", both, clock) / middle("apart", both, clock), 3)
                for clock in (0, 1)
            ],
            "bytes_that_waited": waited,
            "bytes_stored": sum(stored.bytes.values()),
            "captured_by": stored.engine,
            "states": states,
        },
    )


if __name__ == "__main__":
    main()
