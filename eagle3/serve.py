"""Serve one drafter in a real engine and measure what it accepts there, how fast, and what it says.

Every answer of the chosen eval rows is asked for again, as long as it is stored: once of the target
alone, then of the target with the drafter at each k. Acceptance is what the engine counts.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from eagle3.acceptance import Tally, supervised_spans
from eagle3.artifacts import Corpus, Drafter, HiddenStates, TargetModel, write_atomically
from eagle3.engines.base import Sampling
from eagle3.engines.client import HttpClient
from eagle3.engines.served import Asked, ServingEngine
from eagle3.engines.server import EngineInstall, find_engine, running_server
from eagle3.engines.vllm_server import ServerOptions, VllmClient, server_arguments, with_drafter
from eagle3.pair import load_checked_drafter
from eagle3.progress import Reporter
from eagle3.replay import replay_rows
from eagle3.serve_params import ServeParams
from eagle3.served_figures import PLAIN, Difference, ServedRun, Turn, details, metrics
from eagle3.serving import Serving
from eagle3.store.rows import Rows, load_rows
from eagle3.store.states import StateStore
from eagle3.target import end_token_ids, read_embedding
from eagle3.target.folder import trusted_folder

log = logging.getLogger(__name__)

DETAILS_FILE = "serving.json"


def serve_drafter(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    drafter: Drafter,
    params: ServeParams,
    out: Path,
    report: Reporter,
) -> Serving:
    """Measure one drafter inside vLLM and write what was found into `out`.

    serving.json has every run by k, temperature, batch size and domain, and every answer that
    differs; the servers' logs lie beside it.

    Raises:
        ArtifactError: an input was made from another target, corpus or set of states.
        EngineError: no engine, or it does not start or answer.
    """
    _check_origins(target, corpus, states, drafter)
    bench = ServingBench(target, drafter, params, out)
    runs: list[ServedRun] = []
    differences: list[Difference] = []
    for k in (PLAIN, *params.draft_tokens):
        log.info("serving %s", f"with {k} draft tokens" if k else "the target alone")
        with bench.server(k) as http:
            client = VllmClient(http, bench.stop)
            runs += measure(client, k, bench.turns, params, report)
            if k:
                differences += find_differences(runs, k, client.top_two_gap)
    replayed = bench.replay()
    figures = metrics(runs, differences, replayed)
    serving = Serving(
        made_from={r.stage: r.fingerprint for r in (target, corpus, states, drafter)},
        size=drafter.size,
        draft_vocab=drafter.draft_vocab,
        engine=f"{bench.engine.package} {bench.engine.version}",
        dtype=params.dtype,
        draft_sampling=bench.engine.draft_sampling,
        metrics=figures,
    )
    everything = {**serving.model_dump(mode="json"), **details(runs, differences, replayed)}
    write_atomically(out / DETAILS_FILE, json.dumps(everything, indent=2) + "\n")
    serving.save(out)
    return serving


def _check_origins(
    target: TargetModel, corpus: Corpus, states: HiddenStates, drafter: Drafter
) -> None:
    corpus.require_made_from(target, Corpus.home)
    states.require_made_from(target, HiddenStates.home)
    states.require_made_from(corpus, HiddenStates.home)
    for source in (target, corpus, states):
        drafter.require_made_from(source, Drafter.home(drafter.size))


class ServingBench:
    """What every server is started with: target, drafter and the turns to answer."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        params: ServeParams,
        out: Path,
    ) -> None:
        self.engine: EngineInstall = find_engine()
        self.stop = end_token_ids(target)
        self._target, self._drafter, self._params = target, drafter, params
        # Before minutes of serving: a damaged drafter, which an engine would serve without a word.
        self._net, self._maps = load_checked_drafter(drafter, target)
        self._folder = trusted_folder(target, TargetModel.home)
        self._rows: Rows = load_rows(Corpus.home / "eval.zarr")
        self.turns = eval_turns(self._rows, params.prompts)
        self._out = out

    def server(self, k: int) -> AbstractContextManager[HttpClient]:
        """A server of the target, with the drafter unless k is 0."""
        longest = max(len(turn.prompt) + turn.limit for turn in self.turns)
        folder = Drafter.home(self._drafter.size)
        options = ServerOptions(
            target=self._folder,
            trust_remote_code=self._target.trust_remote_code,
            dtype=self._params.dtype,
            # A chain may reach past the answer's end; a shorter limit would cut drafts short.
            max_length=longest + max(self._params.draft_tokens) + 1,
            at_once=max(self._params.batch_sizes),
            speculation=with_drafter(folder, k, self.engine) if k else None,
            states_folder=None,
        )
        log_file = self._out / f"vllm-k{k}.log"
        return running_server(self.engine, server_arguments(options, self.engine), log_file)

    def replay(self) -> dict[int, Tally]:
        """What replay says of the same turns, by k."""
        store = StateStore.open(HiddenStates.home / "eval.zarr")
        ks = self._params.draft_tokens
        chosen = sorted({turn.row for turn in self.turns})
        embedding_VH = read_embedding(self._target).float()
        replayed = replay_rows(
            self._net, embedding_VH, self._maps, self._rows, store.read, ks, chosen
        )
        return {k: sum((replayed[row][k] for row in chosen), Tally.empty(k)) for k in ks}


def eval_turns(rows: Rows, per_domain: int) -> list[Turn]:
    """Every answer of the first eval rows of each domain, with the prompt it answers."""
    seen: Counter[str] = Counter()
    turns = []
    for row, domain in enumerate(rows.domains):
        seen[domain] += 1
        if seen[domain] > per_domain:
            continue
        here = rows.span(row)
        tokens = rows.tokens_N[here].tolist()
        turns += [
            Turn(row, domain, tokens[: span.start], tokens[span])
            for span in supervised_spans(rows.loss_mask_N[here])
        ]
    return turns


def measure(
    engine: ServingEngine, k: int, turns: Sequence[Turn], params: ServeParams, report: Reporter
) -> list[ServedRun]:
    """Let a running server answer all turns, at each temperature and batch size, by domain."""
    domains = sorted({turn.domain for turn in turns})
    combinations = [
        (temperature, batch, domain)
        for temperature in params.temperatures
        for batch in params.batch_sizes
        for domain in domains
    ]
    # The first answer pays for what an engine sets up late.
    engine.run(_asked(turns[:1], 0.0, params.seed), 1)
    runs = []
    for done, (temperature, batch, domain) in enumerate(combinations, start=1):
        mine = [turn for turn in turns if turn.domain == domain]
        served = engine.run(_asked(mine, temperature, params.seed), batch)
        runs.append(ServedRun(k, temperature, batch, domain, mine, served))
        report.progress(f"served at k = {k}", done, len(combinations), "runs")
    return runs


def _asked(turns: Sequence[Turn], temperature: float, seed: int) -> list[Asked]:
    return [Asked(turn.prompt, Sampling(temperature, 1.0, turn.limit, seed)) for turn in turns]


def find_differences(
    runs: Sequence[ServedRun], k: int, top_two_gap: Callable[[Sequence[int]], float] | None
) -> list[Difference]:
    """Greedy answers that the drafter changed, with how near the two tokens were to a tie.

    There should be none; a tie that falls otherwise in a batch of another shape is the one excuse.
    """
    plain = {(run.batch, run.domain): run for run in runs if run.k == PLAIN and run.greedy}
    found = []
    for run in (run for run in runs if run.k == k and run.greedy):
        before = plain[run.batch, run.domain]
        for turn, mine, theirs in zip(
            run.turns, run.served.answers, before.served.answers, strict=True
        ):
            if mine == theirs:
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            gap = top_two_gap([*turn.prompt, *theirs[:at]]) if top_two_gap else None
            found.append(Difference(k, run.batch, run.domain, turn.row, at, gap))
            log.warning("the drafter changed an answer: %s", found[-1])
    return found
