"""Measure one drafter on the eval split: acceptance by replay and by the real loop, and step costs.

Shapes: T tokens of a row, N tokens of an answer, H target width, V target vocabulary,
D draft vocabulary.
"""

import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.acceptance import Tally, drafting_rows, sampled_acceptance, supervised_spans
from eagle3.agreement import (
    Answer,
    close_calls,
    count_difference,
    text_difference,
    warn_of,
)
from eagle3.artifacts import (
    Corpus,
    Drafter,
    Evaluation,
    HiddenStates,
    TargetModel,
    write_atomically,
)
from eagle3.config import EvaluateParams, TargetParams
from eagle3.cost import StepCosts, measure_costs
from eagle3.figures import Findings, LoopResult, TextChecks, acceptance_csv, details, metrics
from eagle3.generate import decode_plainly, speculate
from eagle3.pair import Pair, load_pair
from eagle3.progress import Reporter
from eagle3.replay import draft_chains, replay_rows
from eagle3.store.rows import Rows, load_rows
from eagle3.store.states import StateStore

log = logging.getLogger(__name__)

DETAILS_FILE = "evaluation.json"
CURVE_FILE = "acceptance.csv"


def evaluate_drafter(
    target: TargetModel,
    corpus: Corpus,
    states: HiddenStates,
    drafter: Drafter,
    params: EvaluateParams,
    target_params: TargetParams,
    out: Path,
    report: Reporter,
) -> Evaluation:
    """Evaluate one drafter and write what was found into `out`.

    evaluation.json has every figure by k and domain, each compared row and each near-tie;
    acceptance.csv is for plots; the record, written last, has the figures of the whole split.
    The real loop answers every turn of the first `loop_prompts` eval rows of each domain.

    Raises:
        ArtifactError: an input was made from another target, corpus or set of states.
        CheckpointError: the drafter's weights or vocabulary are not those of its record.
    """
    _check_origins(target, corpus, states, drafter)
    bench = Bench(load_pair(target, drafter, params, target_params), params, report)
    replayed = bench.replay()
    findings = Findings(
        params=params,
        domains=bench.rows.domains,
        replayed=replayed,
        texts=bench.check_texts(),
        loop=bench.run_loop(replayed),
        costs=bench.measure(),
    )
    evaluation = Evaluation(
        made_from={r.stage: r.fingerprint for r in (target, corpus, states, drafter)},
        size=drafter.size,
        draft_vocab=drafter.draft_vocab,
        metrics=metrics(findings),
    )
    everything = {"size": drafter.size, "draft_vocab": drafter.draft_vocab, **details(findings)}
    write_atomically(out / DETAILS_FILE, json.dumps(everything, indent=2) + "\n")
    write_atomically(out / CURVE_FILE, acceptance_csv(findings))
    evaluation.save(out)
    return evaluation


def _check_origins(
    target: TargetModel, corpus: Corpus, states: HiddenStates, drafter: Drafter
) -> None:
    corpus.require_made_from(target, Corpus.home)
    states.require_made_from(target, HiddenStates.home)
    states.require_made_from(corpus, HiddenStates.home)
    home = Drafter.home(drafter.size)
    for source in (target, corpus, states):
        drafter.require_made_from(source, home)


class Bench:
    """One drafter, its target and the eval split, read from their homes."""

    def __init__(self, pair: Pair, params: EvaluateParams, report: Reporter) -> None:
        self.pair, self.params, self.report = pair, params, report
        self.rows: Rows = load_rows(Corpus.home / "eval.zarr")
        self.store = StateStore.open(HiddenStates.home / "eval.zarr")

    def replay(self) -> list[dict[int, Tally]]:
        """Tallies of every row, by k."""
        pair, replayed = self.pair, []
        for row in range(len(self.rows)):
            replayed.append(
                replay_rows(
                    pair.net,
                    pair.embedding_VH,
                    pair.maps,
                    self.rows,
                    self.store.read,
                    self.params.draft_tokens,
                    [row],
                )[row]
            )
            self.report.progress("replay", row + 1, len(self.rows), "rows")
        return replayed

    @torch.inference_mode()
    def check_texts(self) -> TextChecks:
        """Find near-ties and ends of the stored answers, and what sampling would accept there."""
        checks = TextChecks()
        for row in range(len(self.rows)):
            self._check_row(row, checks)
            self.report.progress("answers checked", row + 1, len(self.rows), "rows")
        unexplained = [call for call in checks.not_greedy if call not in checks.near_ties]
        if unexplained:
            log.warning(
                "%d tokens of the eval answers are not the likeliest by the stored states: they "
                "were not answered greedily, or extract.eval_state_dtype is too coarse; first: %s",
                len(unexplained),
                unexplained[0],
            )
        return checks

    def _check_row(self, row: int, checks: TextChecks) -> None:
        here = self.rows.span(row)
        tokens_T = self.rows.tokens_N[here].astype("int64")
        aux_T3H, last_TH = self.store.read(here.start, here.stop)
        drafted_TH = self._drafted_states(tokens_T, aux_T3H)
        for span in supervised_spans(self.rows.loss_mask_N[here]):
            logits_NV = self.pair.target_logits(last_TH[span.start - 1 : span.stop - 1])
            near, strange = close_calls(
                self.rows.row_ids[row], tokens_T, span, logits_NV, self.params.near_tie
            )
            checks.near_ties += near
            checks.not_greedy += strange
            checks.answers += 1
            checks.truncated += int(tokens_T[span.stop - 1]) not in self.pair.end_tokens
            # Row t guesses what the target says at t + 1; its first answer token is not drafted.
            draft_logits_ND = self.pair.net.logits(drafted_TH[drafting_rows(span)])
            ids_D = self.pair.maps.ids_D.to(self.pair.device)
            alpha_N = sampled_acceptance(logits_NV[1:], draft_logits_ND, ids_D)
            checks.sampled_sum += alpha_N.sum().item()
            checks.sampled_count += len(alpha_N)

    def _drafted_states(self, tokens_T: np.ndarray, aux_T3H: Tensor) -> Tensor:
        """The drafter's state at every row that has a next token, first draft step: [T - 1, H]."""
        drafter = self.pair.draft_decoder()
        features_TH = self.pair.net.fuse(aux_T3H[:-1].to(self.pair.embedding_VH))
        return drafter.step(tokens_T[1:].tolist(), features_TH)

    def run_loop(self, replayed: list[dict[int, Tally]]) -> LoopResult:
        """Let drafter and target answer together, and compare with replay and with greedy text."""
        k, result = self.params.loop_draft_tokens, LoopResult()
        chosen = self._loop_rows()
        for done, row in enumerate(chosen, start=1):
            answers = self._answers(row)
            in_draft_V = self.pair.maps.t2d_V
            tally = sum(
                (answer.generated.tally(k, in_draft_V) for answer in answers), Tally.empty(k)
            )
            result.tallies[row] = tally
            self._compare(row, answers, replayed[row][k], tally, result)
            self.report.progress("real loop", done, len(chosen), "prompts")
        return result

    def _loop_rows(self) -> list[int]:
        """The first eval rows of each domain."""
        seen: Counter[str] = Counter()
        chosen = []
        for row, domain in enumerate(self.rows.domains):
            seen[domain] += 1
            if seen[domain] <= self.params.loop_prompts:
                chosen.append(row)
        return chosen

    def _answers(self, row: int) -> list[Answer]:
        here = self.rows.span(row)
        tokens = self.rows.tokens_N[here].tolist()
        answers = []
        for span in supervised_spans(self.rows.loss_mask_N[here]):
            generated = speculate(
                self.pair.target_decoder(),
                self.pair.draft_decoder(),
                tokens[: span.start],
                # A stored answer without an end token was cut: there the loop stops, too.
                limit=span.stop - span.start,
                k=self.params.loop_draft_tokens,
                end_tokens=self.pair.end_tokens,
            )
            answers.append(Answer(self.rows.row_ids[row], span, tokens, generated))
        return answers

    def _compare(
        self, row: int, answers: list[Answer], replay: Tally, loop: Tally, result: LoopResult
    ) -> None:
        near_tie = self.params.near_tie
        texts = [text_difference(answer, near_tie, self._write_plainly) for answer in answers]
        found = [difference for difference in texts if difference]
        counts = count_difference(
            self.rows.row_ids[row],
            replay,
            loop,
            [draft for answer in answers for draft in answer.generated.drafts],
            lambda position: self._replay_chain(row, position),
            near_tie,
            text_near_tie=any(difference.near_tie for difference in found),
        )
        result.text_differences += found
        for difference in found:
            warn_of(difference)
        if counts:
            result.count_differences.append(counts)
            warn_of(counts)

    def _write_plainly(self, answer: Answer) -> list[int]:
        return decode_plainly(
            self.pair.target_decoder(),
            answer.tokens[: answer.span.start],
            limit=answer.span.stop - answer.span.start,
            end_tokens=self.pair.end_tokens,
        ).tokens

    def _replay_chain(self, row: int, position: int) -> list[int]:
        """What replay drafted from one position of a row."""
        here = self.rows.span(row)
        device = self.pair.device
        aux_T3H, _ = self.store.read(here.start, here.stop)
        return draft_chains(
            self.pair.net,
            self.pair.embedding_VH,
            self.pair.maps,
            torch.from_numpy(self.rows.tokens_N[here].astype("int64")).to(device),
            aux_T3H.to(self.pair.embedding_VH),
            torch.tensor([position], device=device),
            self.params.loop_draft_tokens,
        )[0].tolist()

    def measure(self) -> StepCosts:
        """Step costs after a context of the split's median row."""
        lengths = np.diff(self.rows.offsets_R1)
        median = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])
        return measure_costs(
            self.pair.target_decoder(),
            self.pair.draft_decoder(),
            self.rows.tokens_N[self.rows.span(median)].tolist(),
            self.params.draft_tokens,
            self.params.timing_repeats,
        )
