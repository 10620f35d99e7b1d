"""One training run: network, optimizer, data, and what was measured on the way.

The best checkpoint is the one with the longest replayed acceptance length on the validation split,
not the last: acceptance peaks before the training loss stops falling. Work goes on from the last
training state; the order of the data is a function of the step, so a resumed run is the same run.

Shapes: N packed tokens, U predicting positions, M rows that count, V target vocabulary, H width.
"""

import logging
import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.artifacts import DraftVocab, HiddenStates, TargetModel
from eagle3.batches import RowsReader, training_steps
from eagle3.checkpoint import save_drafter
from eagle3.config import DrafterParams, TrainParams
from eagle3.device import TORCH_DTYPES, pick_device
from eagle3.drafter import DraftShape
from eagle3.errors import TrainingError
from eagle3.hot.float8 import require_float8_cores
from eagle3.hot.step import HotPath
from eagle3.initialise import first_drafter
from eagle3.kept import keep_drafter
from eagle3.loss import TargetHead, head_loss, predict_target
from eagle3.maps import load_maps
from eagle3.optimizer import adamw, clip_and_update, learning_rate
from eagle3.pace import Pace
from eagle3.progress import Reporter
from eagle3.reader_processes import ReaderProcesses
from eagle3.replay import replay_rows
from eagle3.sharding import place
from eagle3.splits import open_split
from eagle3.store.refused import read_rows
from eagle3.store.states import StateStore
from eagle3.stream import StateStream
from eagle3.target import read_embedding, read_final_norm, read_head
from eagle3.team import ALONE, Team
from eagle3.training_state import resume_state, save_state
from eagle3.ttt import Batch, plan_unrolling, supervised_predictors, unroll

log = logging.getLogger(__name__)

VALIDATED = "acceptance_length_validation"


class Trainer:
    """One run: network, optimizer, data and what was measured so far."""

    def __init__(
        self,
        target: TargetModel,
        vocab: DraftVocab,
        drafter_params: DrafterParams,
        params: TrainParams,
        work: Path,
        report: Reporter,
        team: Team = ALONE,
        stream: StateStream | None = None,
    ) -> None:
        self.params, self.work, self.report, self.team = params, work, report, team
        self.aux_layers = target.aux_layers
        self.device = team.device(pick_device(params.device, "train.device"))
        if params.head_products == "float8":
            require_float8_cores(self.device)
        dtype = TORCH_DTYPES[params.dtype]
        norm_H, eps = read_final_norm(target)
        self.embedding_VH = read_embedding(target).to(self.device, dtype)
        head_VH = read_head(target)
        self.head = TargetHead(norm_H.to(self.device, dtype), eps, head_VH.to(self.device, dtype))
        self.maps = load_maps(vocab)
        shape = DraftShape.of(
            drafter_params, target.hidden_size, target.vocab_size, vocab.draft_vocab
        )
        net = first_drafter(shape, params, target.aux_layers, self.maps, norm_H, head_VH)
        self.net = net.to(self.device)
        self.placement = place(self.net, params.sharding, team, self.device)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        betas = (params.beta1, params.beta2)
        self.optimizer = adamw(trained, params.learning_rate, betas, params.weight_decay)
        # The plain path and the hot one give the same loss (tests/eagle3/test_hot.py). The hot one
        # wins where its kernels run: bf16 on a GPU.
        self.hot: HotPath | None = None
        if self.device.type == "cuda" and params.dtype == "bfloat16":
            self.use_hot_path()
        self.stream = stream
        self.train_store: StateStore | StateStream
        self.train_rows, self.train_store = (stream.rows, stream) if stream else open_split("train")
        self.validation_rows, self.validation_store = open_split("validation")
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self.best: dict[str, Any] = {}
        # A signal may come at any instruction; weights are whole except inside an update.
        self._updating = False

    def use_hot_path(self) -> None:
        """Take steps by the hot path from now on."""
        net, given = self.placement.net_of_hot_path(), (self.embedding_VH, self.head, self.maps)
        how = (self.params.loss, self.params.recompute, self.params.head_products)
        self.hot = HotPath(net, *given, *how)
        self.placement.refresh(self.hot)

    def run(self) -> None:
        """Train to the last step, from the state of an earlier run if there is one."""
        self._resume()
        self.team.require_same_step(self.step)
        if self.stream:
            self.stream.start(self.step)
        try:
            with self.placement.holding_signals():
                # A run may have been stopped between an update and the validation after it.
                if self._validates and VALIDATED not in (self.curve[-1] if self.curve else {}):
                    self._validate()
                self._train()
        except BaseException:
            if self.placement.stops_alone and not self._updating and self.curve:
                self._save()
            raise

    @property
    def _validates(self) -> bool:
        return self.step % self.params.validate_every == 0 or self.step == self.params.total_steps

    def _train(self) -> None:
        readers = self.params.reader_processes if self.device.type == "cuda" else 0
        if self.stream or not readers:
            return self._take_steps(self.train_store.read_rows)
        with closing(ReaderProcesses(HiddenStates.home / "train.zarr", readers)) as processes:
            self._take_steps(partial(read_rows, self.train_store.refused, processes.read_spans))

    def _take_steps(self, read: RowsReader) -> None:
        params = self.params
        batches = training_steps(
            self.train_rows,
            read,
            batch_tokens=params.batch_tokens,
            accumulate=params.accumulate,
            seed=params.seed,
            skip=self.step,
            stop=params.total_steps,
            device=self.device,
            team=self.team,
        )
        pace = Pace()
        while self.step < params.total_steps:
            with pace.waiting():
                micro_batches = next(batches)
            figures = self._update(micro_batches)
            self.placement.stop_if_told(self._save)
            pace.tokens += self.team.count(sum(len(batch.tokens_N) for batch in micro_batches))
            last = self.step == params.total_steps
            self.report.progress("training", self.step, params.total_steps, "steps")
            if self.step % params.log_every == 0 or last:
                self.report.metrics({**figures, **pace.figures()}, self.step)
                pace = Pace()
            if self._validates:
                self._validate()
                self._save()
                pace = Pace()

    def _update(self, micro_batches: list[Batch]) -> dict[str, float]:
        """Take one optimizer step."""
        loss, accuracy = self.backward(micro_batches)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {self.step}; lower "
                f"train.learning_rate ({self.params.learning_rate:g}) or "
                f"train.max_grad_norm ({self.params.max_grad_norm:g})"
            )
        rate = learning_rate(self.params, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._updating = True
        norm = clip_and_update(self.optimizer, self.params.max_grad_norm)
        if self.hot:
            self.placement.refresh(self.hot)
        figures = {"loss": loss, "learning_rate": rate, "grad_norm": norm.item()}
        figures |= {f"accuracy_step{index}": value for index, value in enumerate(accuracy)}
        self.step += 1
        self.curve.append({"step": self.step, **figures})
        self._updating = False
        return figures

    def backward(self, micro_batches: list[Batch]) -> tuple[float, list[float]]:
        """Add the gradient of the loss over all micro-batches of the team, as if they were one.

        Returns the loss per supervised prediction (in nats, but for `tv`), the steps weighted and
        summed, and for each step the share of counted rows whose argmax is the target's.
        """
        supervised = self.team.count(
            sum(
                int(supervised_predictors(batch.loss_mask_N, batch.documents).sum())
                for batch in micro_batches
            )
        )
        # Figures in float64: their sum is then the same however the team shares the work.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = torch.zeros(self.params.ttt_steps, dtype=torch.float64, device=self.device)
        counted = torch.zeros_like(hits)
        # A step may hold no supervised prediction at all: divide by at least one.
        decay, divisor = self.params.step_decay, max(supervised, 1)
        weights = [decay**index / divisor for index in range(self.params.ttt_steps)]
        for batch in micro_batches:
            if self.hot:
                scored = self.hot.backward(batch, weights)
                part = (scored.nats_S * torch.tensor(weights, device=self.device)).sum()
                batch_hits = scored.hits_S
                batch_counted = torch.tensor(scored.counted, device=self.device)
            else:
                nats, batch_hits, batch_counted = self.placement.run(
                    partial(self.batch_loss, batch)
                )
                part = nats / divisor
                part.backward()
            loss += part.detach()
            hits += batch_hits
            counted += batch_counted
        if supervised:
            self.placement.sum_gradients()
        total, *figures = self.team.sums([*loss[None].tolist(), *hits.tolist(), *counted.tolist()])
        pairs = zip(figures[: len(hits)], figures[len(hits) :], strict=True)
        return total, [agreed / max(rows, 1) for agreed, rows in pairs]

    def batch_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over steps and rows of the weighted loss; hits and counted rows per step."""
        unrolling = plan_unrolling(batch.loss_mask_N, batch.documents, self.params.ttt_steps)
        mixed = self.params.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            with torch.no_grad():
                last_UH = batch.last_NH[unrolling.predictors_U]
                prediction = predict_target(self.head, self.maps, last_UH, self.params.loss)
                embedding_NH = self.embedding_VH[batch.tokens_N]
            batch = batch.with_states_as(TORCH_DTYPES[self.params.dtype])
            total = torch.zeros((), device=self.device)
            hits, counted = [], []
            for index, (step, state_RH) in enumerate(
                unroll(self.net, batch, embedding_NH, unrolling, self.params.recompute)
            ):
                hidden_MH = self.net.head_input(state_RH[step.counted_M])
                nats, agreed = head_loss(
                    hidden_MH, self.net.lm_head.weight, prediction, step.predictor_M
                )
                total = total + self.params.step_decay**index * nats
                hits.append(agreed)
                counted.append(len(step.counted_M))
        return total, torch.stack(hits), torch.tensor(counted, device=self.device)

    def _validate(self) -> None:
        """Replay the validation split; keep this checkpoint if it is the best so far."""
        with self.placement.whole():
            self._replay_and_keep()

    def _replay_and_keep(self) -> None:
        k = self.params.validate_draft_tokens
        rows = self.validation_rows
        which = self.team.share(self.validation_store.rows_with_states(rows))
        self.net.eval()
        read = self.validation_store.read
        embedding_VH = self.embedding_VH.float()
        per_row = replay_rows(self.net, embedding_VH, self.maps, rows, read, (k,), which)
        self.net.train()
        drafts = self.team.count(sum(tallies[k].drafts for tallies in per_row.values()))
        accepted = self.team.count(sum(tallies[k].accepted for tallies in per_row.values()))
        length = 1 + accepted / max(drafts, 1)
        self.report.metrics({VALIDATED: length}, self.step)
        if self.curve and self.curve[-1]["step"] == self.step:
            self.curve[-1][VALIDATED] = length
        else:
            self.curve.append({"step": self.step, VALIDATED: length})
        best = not self.best or length > self.best["acceptance_length"]
        if self.team.leads:
            newest = self.params.keep_checkpoints
            keep_drafter(self.work, self.step, self._write_drafter, best=best, newest=newest)
        if best:
            self.best = {"step": self.step, "acceptance_length": length}

    def _write_drafter(self, folder: Path) -> None:
        save_drafter(self.net, self.maps, self.aux_layers, folder)

    def _save(self) -> None:
        facts = {"step": self.step, "curve": self.curve, "best": self.best}
        state = (self.work, self.net, self.optimizer, self.placement)
        save_state(*state, facts, self.team.leads)

    def _resume(self) -> None:
        facts = resume_state(self.work, self.net, self.optimizer, self.placement)
        if facts is None:
            return
        self.step, self.curve, self.best = facts["step"], facts["curve"], facts["best"]
        if self.hot:
            self.placement.refresh(self.hot)
        log.info("going on from step %d of %d", self.step, self.params.total_steps)
