"""Drafters of gpu_drafter.py in vLLM on this machine, beside replay of the same answers.

    python benchmarks/serve_gpu_drafter.py PROJECT 32000 full --target FOLDER [--prompts 5]

PROJECT has what gpu_drafter.py left: models/SIZE and data/corpus/eval.zarr. Its answers were
written in bfloat16 and a GPU rounds otherwise, so replay is over what this machine's vLLM wrote, in
float32, and over states that transformers gives for it. Greedy; one server without a drafter, then
one for each size, with --at-once prompts in flight. Needs `make engine`. Seconds include prefill,
and mean something only if nothing else runs.
"""

import argparse
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eagle3.acceptance import Tally
from eagle3.artifacts import Drafter, write_atomically
from eagle3.checkpoint import load_drafter
from eagle3.config import PARAMS_FILE, VocabSize, load_params, parse_size
from eagle3.engines.base import Sampling
from eagle3.engines.counters import total
from eagle3.engines.served import Asked, Served
from eagle3.engines.server import find_engine, running_server
from eagle3.engines.transformers import TransformersEngine
from eagle3.engines.vllm_server import ServerOptions, VllmClient, server_arguments, with_drafter
from eagle3.replay import replay_rows
from eagle3.serve import eval_turns
from eagle3.served_figures import Turn
from eagle3.store.rows import Rows, load_rows
from eagle3.target import bring_target, end_token_ids, read_embedding

RESULT = Path("served.json")


class Bench:
    """The target in float32, and the first questions of each held-out benchmark."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        params = load_params(Path(PARAMS_FILE)).target
        self.params = params.model_copy(update={"source": str(args.target), "dtype": "float32"})
        self.target, self.home = bring_target(self.params, home), home
        self.k, self.at_once = args.draft_tokens, args.at_once
        turns = eval_turns(load_rows(Path("data/corpus/eval.zarr")), args.prompts)
        self.turns = {
            domain: [turn for turn in turns if turn.domain == domain]
            for domain in sorted({turn.domain for turn in turns})
        }

    def serve(self, size: VocabSize | None) -> dict[str, Served]:
        """All answers by domain; without a size, of the target alone."""
        engine = find_engine()
        speculation = with_drafter(Drafter.home(size), self.k, engine) if size else None
        every = [turn for turns in self.turns.values() for turn in turns]
        options = ServerOptions(
            target=self.home.resolve(),
            trust_remote_code=False,
            dtype="float32",
            max_length=max(len(turn.prompt) + turn.limit for turn in every) + self.k + 1,
            at_once=self.at_once,
            speculation=speculation,
            states_folder=None,
        )
        log_file = Path(f"vllm-{size or 'plain'}.log")
        with running_server(engine, server_arguments(options, engine), log_file) as http:
            client = VllmClient(http, end_token_ids(self.target, self.home))
            # The first answer pays for what an engine sets up late.
            client.run(_asked(every[:1]), 1)
            return {
                domain: client.run(_asked(turns), self.at_once)
                for domain, turns in self.turns.items()
            }

    def replayed(self, size: VocabSize, served: dict[str, Served]) -> dict[str, Tally]:
        """Replay of what was served, by domain."""
        net, maps = load_drafter(Drafter.home(size))
        engine = TransformersEngine(self.target, self.params, self.home)
        embedding_VH = read_embedding(self.target, self.home).float()
        tallies = {}
        for domain, turns in self.turns.items():
            tallies[domain] = Tally.empty(self.k)
            for turn, answer in zip(turns, served[domain].answers, strict=True):
                rows = _row_of(turn, answer)
                [states] = engine.states([rows.tokens_N.tolist()])
                found = replay_rows(
                    net, embedding_VH, maps, rows,
                    lambda start, stop, states=states: (  # type: ignore[misc]
                        states.aux_T3H[start:stop], states.last_TH[start:stop]
                    ),
                    (self.k,), [0],
                )  # fmt: skip
                tallies[domain] += found[0][self.k]
        return tallies


def _asked(turns: list[Turn]) -> list[Asked]:
    return [Asked(turn.prompt, Sampling(0.0, 1.0, turn.limit, 0)) for turn in turns]


def _row_of(turn: Turn, answer: list[int]) -> Rows:
    tokens = [*turn.prompt, *answer]
    return Rows(
        tokens_N=np.array(tokens, np.int32),
        loss_mask_N=np.arange(len(tokens)) >= len(turn.prompt),
        offsets_R1=np.array([0, len(tokens)], np.int64),
        domains=(turn.domain,),
        row_ids=("served",),
    )


def figures(
    served: dict[str, Served], plain: dict[str, Served], replayed: dict[str, Tally], k: int
) -> dict[str, dict[str, Any]]:
    """Of each domain and of all together."""
    groups = {domain: [domain] for domain in served} | {"all": list(served)}
    return {
        name: _of_group(
            [served[domain] for domain in domains],
            [plain[domain] for domain in domains],
            sum((replayed[domain] for domain in domains), Tally.empty(k)),
        )
        for name, domains in groups.items()
    }


def _of_group(served: list[Served], plain: list[Served], replayed: Tally) -> dict[str, Any]:
    answers = [answer for each in served for answer in each.answers]
    before = [answer for each in plain for answer in each.answers]
    counters = total(each.counters for each in served)
    seconds, seconds_plain = (sum(each.seconds for each in runs) for runs in (served, plain))
    return {
        "answers": len(answers),
        "unchanged": sum(a == b for a, b in zip(answers, before, strict=True)),
        "tokens": sum(each.tokens for each in served),
        "drafts": counters.drafts,
        "accepted": counters.accepted,
        "replayed_drafts": replayed.drafts,
        "replayed_accepted": replayed.accepted,
        "seconds": seconds,
        "seconds_plain": seconds_plain,
        "served": counters.acceptance_length,
        "replay": replayed.acceptance_length,
        "faster_by": seconds_plain / seconds,
    }


def main() -> None:
    """Serve and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("sizes", nargs="+", type=parse_size, help="numbers of tokens, or full")
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=5, help="questions of each benchmark")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=8, help="prompts in flight")
    args = parser.parse_args()
    args.target = args.target.resolve()
    os.chdir(args.project)
    with TemporaryDirectory(prefix="target-", dir=".") as folder:
        bench = Bench(args, Path(folder))
        plain = bench.serve(None)
        served = {size: bench.serve(size) for size in args.sizes}
        result = {
            str(size): figures(here, plain, bench.replayed(size, here), bench.k)
            for size, here in served.items()
        }
    write_atomically(RESULT, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
