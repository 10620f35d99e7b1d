"""The plan of a run against what was measured, and against the tensors of a real trainer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipeline import make_inputs, train

from eagle3.artifacts import Drafter, HiddenStates
from eagle3.batches import read_batch
from eagle3.cli import main
from eagle3.config import Params, load_params
from eagle3.counts import ParameterTable, parameter_table
from eagle3.errors import ParamsError
from eagle3.footprint import (
    Work,
    drafter_bytes,
    fixed_memory,
    gradient_bytes,
    hot_peak,
    state_bytes,
    training_state_bytes,
)
from eagle3.hot.step import HotPath
from eagle3.loss import TargetHead
from eagle3.optimizer import clip_and_update
from eagle3.plan import States, plan_training
from eagle3.progress import ConsoleReporter
from eagle3.store.ratio import EXPECTED_RATIO
from eagle3.store.states import StateStore
from eagle3.throughput import MEASURED_SHAPE, rate, step_flops
from eagle3.trainer import Trainer
from eagle3.ttt import Batch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/train_step.json"
PEAK_FLOPS = 989.4e12
"""Of benchmarks/train_step.py's mfu."""
MEASURED = [
    record
    for record in json.loads(RESULTS.read_text())
    if record["trainer"] == "eagle3" and record["supervised"] == 1
]
SIZE = 128


@pytest.fixture
def kimi() -> Params:
    return load_params(ROOT / "presets/kimi-k2.5.yaml")


def with_frozen_head(table: ParameterTable) -> ParameterTable:
    tensors = tuple(
        replace(tensor, trainable=tensor.trainable and tensor.name != "lm_head.weight")
        for tensor in table.tensors
    )
    return ParameterTable(table.draft_vocab, tensors)


def name_of(record: dict[str, Any]) -> str:
    return record["case"]


@pytest.mark.parametrize("record", MEASURED, ids=name_of)
def test_planned_memory_is_within_a_tenth_of_the_measured_peak(
    kimi: Params, record: dict[str, Any]
):
    draft_vocab = record["draft_vocab"]
    full = draft_vocab == MEASURED_SHAPE.vocab_size
    table = parameter_table(kimi, "full" if full else draft_vocab)
    if not record["head_trained"]:
        table = with_frozen_head(table)
    work = Work(
        record["tokens"],
        record["ttt"],
        accumulate=1,
        held=1,
        recompute=record.get("recompute", False),
        head_products=record.get("head_products", "dtype"),
    )
    parts = hot_peak(table, replace(MEASURED_SHAPE, draft_vocab=draft_vocab), work)

    assert sum(parts.values()) / 2**30 == pytest.approx(record["peak_gib"], rel=0.1)


@pytest.mark.parametrize("record", MEASURED, ids=name_of)
def test_operations_of_a_step_are_those_that_the_benchmark_counted(record: dict[str, Any]):
    shape = replace(MEASURED_SHAPE, draft_vocab=record["draft_vocab"])
    counted = record["mfu"] * record["seconds"] * PEAK_FLOPS

    flops = step_flops(shape, record["tokens"], record["ttt"], record["head_trained"])
    assert flops == pytest.approx(counted, rel=1e-3)


def test_the_plan_of_a_measured_case_has_the_slowest_measured_rate(kimi: Params):
    plan = plan_training(kimi, 17_300_000, gpus=1, results=RESULTS)

    for size in plan.sizes:
        measured = min(
            record["tokens_per_s"]
            for record in MEASURED
            if record["head_trained"]
            and not record.get("recompute", False)
            and record.get("head_products", "dtype") == "dtype"
            and (record["tokens"], record["ttt"], record["draft_vocab"])
            == (8192, 7, size.draft_vocab)
        )
        assert size.time is not None
        assert size.time.tokens_per_s == measured
        assert size.time.seconds_per_epoch == pytest.approx(17_300_000 / measured)
        assert size.time.basis.startswith("measured on NVIDIA H200")
    assert [size.size for size in plan.sizes] == [32_000, "full"]


def test_a_case_that_was_not_measured_is_scaled_and_says_so():
    between = rate(MEASURED_SHAPE, 8192, 5, results=RESULTS)
    few, many = (rate(MEASURED_SHAPE, 8192, steps, results=RESULTS) for steps in (3, 7))
    assert between is not None
    assert few is not None
    assert many is not None

    assert many.tokens_per_s < between.tokens_per_s < few.tokens_per_s
    assert between.basis.startswith("not measured: scaled by operations a token")


def test_a_frozen_head_is_given_the_rate_of_a_frozen_head():
    frozen = rate(MEASURED_SHAPE, 8192, 7, head_trained=False, results=RESULTS)
    trained = rate(MEASURED_SHAPE, 8192, 7, results=RESULTS)
    assert frozen is not None
    assert trained is not None

    assert frozen.tokens_per_s > trained.tokens_per_s
    assert frozen.basis.endswith("frozen head")


def test_several_gpus_share_time_and_micro_batches(kimi: Params):
    one, four = (plan_training(kimi, 10**6, gpus, RESULTS).sizes[0] for gpus in (1, 4))
    assert one.time is not None
    assert four.time is not None

    assert four.time.seconds_per_epoch == pytest.approx(one.time.seconds_per_epoch / 4)
    assert "4 GPUs taken as 4 times one (two were measured at 1.93 times)" in four.time.basis
    assert four.memory.bytes < one.memory.bytes


def test_weights_and_moments_in_parts_take_less_of_every_gpu(kimi: Params):
    parted = kimi.model_copy(update={"train": kimi.train.model_copy(update={"sharding": "full"})})
    whole, parts = (plan_training(params, 10**6, 4, RESULTS).sizes for params in (kimi, parted))

    for one, other in zip(whole, parts, strict=True):
        saved = one.memory.bytes - other.memory.bytes
        # Three quarters of 4 bytes of weight and 8 of moments; no gradient, no bfloat16 copy.
        assert saved == pytest.approx(0.75 * 12 * one.trainable, rel=1e-6)


def test_gpus_that_cannot_share_a_step_name_the_key_to_raise(kimi: Params):
    with pytest.raises(ParamsError, match=r"set train\.accumulate to a multiple of 3"):
        plan_training(kimi, 10**6, 3, RESULTS)


def test_what_nobody_measured_is_not_made_up(kimi: Params, tiny_params: Params, tmp_path: Path):
    plain = plan_training(tiny_params, 1000, 1, RESULTS).sizes[0]
    assert (plain.time, plain.memory.missing[:17]) == (None, "states and logits")
    assert "bfloat16 on a GPU alone" in plain.no_time

    nowhere = plan_training(kimi, 1000, 1, tmp_path / "none.json").sizes[0]
    assert nowhere.time is None
    assert "run this in the project" in nowhere.no_time


def test_states_that_are_not_kept_take_a_window_of_shards_for_one_epoch_and_all_for_more(
    kimi: Params,
):
    def states(keep: bool, steps: int) -> States:
        extract = kimi.extract.model_copy(update={"keep": keep})
        train_params = kimi.train.model_copy(update={"total_steps": steps})
        changed = kimi.model_copy(update={"extract": extract, "train": train_params})
        return plan_training(changed, 17_300_000, 1, RESULTS).states

    kept, window, again = states(True, 100), states(False, 100), states(False, 1000)

    _, four_shards = state_bytes(7168, 4 * 32768, "bfloat16")
    assert window.bytes == four_shards < kept.bytes == again.bytes
    assert "at most 4 shards on disk at a time" in window.basis
    assert "all lie on disk until the last epoch" in again.basis


def test_a_float8_heads_gradients_of_logits_wait_in_a_byte_each_up_to_a_limit(kimi: Params):
    table = parameter_table(kimi, "full")
    full = replace(MEASURED_SHAPE, draft_vocab=163_840)
    few = Work(8192, 7, accumulate=1, held=1, recompute=False, head_products="float8")
    many = replace(few, tokens=16_384)
    waiting = "gradients of logits, float8"

    assert hot_peak(table, full, few)[waiting] == 8192 * 7 * 163_840
    assert hot_peak(table, full, many)[waiting] == 10 * 2**30
    assert waiting not in hot_peak(with_frozen_head(table), full, few)


def test_float8_head_products_take_a_byte_a_logit_more_and_have_rates_of_their_own(
    kimi: Params, tmp_path: Path
):
    table = parameter_table(kimi, "full")
    work = Work(8192, 7, accumulate=4, held=1, recompute=False)
    full = replace(MEASURED_SHAPE, draft_vocab=163_840)
    narrow = hot_peak(table, full, replace(work, head_products="float8"))
    assert narrow["head, two float8 copies"] == 2 * 163_840 * 7168 + 4 * (163_840 + 7168)
    assert (
        narrow["weights, bfloat16 copies"] < hot_peak(table, full, work)["weights, bfloat16 copies"]
    )

    record = next(r for r in MEASURED if r["case"] == "s8192-ttt7-vocab-full-head-frozen")
    faster = record | {"head_products": "float8", "tokens_per_s": 2 * record["tokens_per_s"]}
    (tmp_path / "results.json").write_text(json.dumps([record, faster]))
    given = {"head_trained": False, "results": tmp_path / "results.json"}
    plain = rate(full, 8192, 7, **given)
    found = rate(full, 8192, 7, **given, head_products="float8")
    assert plain is not None
    assert found is not None
    assert (plain.tokens_per_s, found.tokens_per_s) == (
        record["tokens_per_s"],
        faster["tokens_per_s"],
    )
    assert found.basis.endswith("frozen head, float8 head products")

    (tmp_path / "results.json").write_text(json.dumps([record]))
    unknown = rate(full, 8192, 7, **given, head_products="float8")
    assert unknown is not None
    assert unknown.basis.startswith("not measured")


def test_damaged_results_are_named(tmp_path: Path):
    (tmp_path / "results.json").write_text('[{"trainer": "eagle3"}]')
    with pytest.raises(ParamsError, match=r"results\.json holds .* take it from git"):
        rate(MEASURED_SHAPE, 8192, 7, results=tmp_path / "results.json")


def test_planned_bytes_are_those_of_a_real_trainers_tensors_and_files(
    tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    inputs = make_inputs(tiny_params, SIZE)
    trainer = Trainer(
        inputs.target, inputs.vocab, tiny_params.drafter, tiny_params.train, tmp_path,
        ConsoleReporter(),
    )  # fmt: skip
    table = parameter_table(tiny_params, SIZE)
    parts = fixed_memory(table, "float32", hot=False)
    parameters = list(trainer.net.parameters())
    head = trainer.head

    assert parts["weights, float32"] == sum(p.nbytes for p in parameters)
    held = trainer.embedding_VH.nbytes + head.head_VH.nbytes + head.norm_H.nbytes
    assert parts["target's embedding and head"] == held
    trainer.backward([trainer_batch(trainer)])
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    assert gradient_bytes(table) == gradients
    clip_and_update(trainer.optimizer, 1.0)
    moments = sum(
        state[name].nbytes
        for state in trainer.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )
    assert parts["AdamW's moments, float32"] == moments
    narrow = TargetHead(head.norm_H.bfloat16(), head.eps, head.head_VH.bfloat16())
    hot = HotPath(trainer.net, trainer.embedding_VH.bfloat16(), narrow, trainer.maps)
    copies = sum(stack.nbytes for stack in hot.stacks)
    assert fixed_memory(table, "bfloat16", hot=True)["weights, bfloat16 copies"] == copies
    given = (trainer.net, trainer.embedding_VH.bfloat16(), narrow, trainer.maps)
    float8 = HotPath(*given, head_products="float8")
    parts = fixed_memory(table, "bfloat16", hot=True, head_products="float8")
    assert parts["head, two float8 copies"] == float8.head.nbytes
    copies = sum(stack.nbytes for stack in float8.stacks) - float8.head.nbytes
    assert parts["weights, bfloat16 copies"] == copies

    train(inputs, tiny_params)
    drafter = load_file(Drafter.home(SIZE) / "model.safetensors")
    assert drafter_bytes(table, inputs.target.vocab_size) == nbytes(drafter)
    state = load_file(Drafter.home(SIZE) / "training" / "state.safetensors")
    without_counts = {name: t for name, t in state.items() if not name.startswith("optimizer.step")}
    assert training_state_bytes(table) == nbytes(without_counts)
    store = StateStore.open(HiddenStates.home / "train.zarr")
    raw, _ = state_bytes(32, store.header.tokens, "bfloat16")
    aux, last = store.read(0, store.header.tokens)
    assert raw == aux.nbytes + last.nbytes


def trainer_batch(trainer: Trainer) -> Batch:
    return read_batch(trainer.train_rows, trainer.train_store.read_rows, (0, 1), trainer.device)


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_the_command_sets_the_draft_vocabularies_side_by_side(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    arguments = ["plan", "--preset", "kimi-k2.5", "--tokens", "17300000"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"] if as_json else arguments)
    out = capsys.readouterr().out

    assert not ended.value.code
    if not as_json:
        assert "32,000" in out
        assert "full (163,840)" in out
        assert "measured on NVIDIA H200" in out
        return
    answer = json.loads(out)
    assert answer["states"]["bytes"] == round(
        answer["states"]["raw_bytes"] * EXPECTED_RATIO["bfloat16"]
    )
    assert answer["states"]["raw_bytes"] == 17_300_000 * 4 * 7168 * 2
    small, full = answer["sizes"]
    assert (small["draft_vocab"], full["draft_vocab"]) == (32_000, 163_840)
    for size in (small, full):
        assert size["memory"]["bytes"] == sum(size["memory"]["parts"].values())
        assert size["time"]["seconds_per_epoch"] > 0
