import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from s3_server import TestBucket, s3_server

from eagle3.cli import main
from eagle3.store.layout import Header
from eagle3.store.pointer import Pointer, Where
from eagle3.store.refused import Refused
from eagle3.store.rows import Rows, rows_sha256
from eagle3.store.states import StateStore
from eagle3.store.writer import StateWriter

Run = Callable[[Sequence[str]], tuple[int, str, str]]

ROWS = Rows(
    tokens_N=np.array([5, 6, 7, 5, 8, 9], dtype=np.int32),
    loss_mask_N=np.array([0, 1, 1, 0, 0, 1], dtype=bool),
    offsets_R1=np.array([0, 3, 6], dtype=np.int64),
    domains=("chat", "code"),
    row_ids=("first", "second"),
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `eagle3`: exit code, standard output, standard error."""

    def run(arguments: Sequence[str]) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def write_store(path: Where, shards: Sequence[int] = (0, 1)) -> Header:
    """Two shards of 4 and 2 tokens, width 4; every number of token n's states is n + 1."""
    header = Header(
        target="tiny",
        target_fingerprint="t" * 64,
        rows_sha256=rows_sha256(ROWS),
        tokens=6,
        rows=2,
        hidden_size=4,
        aux_layers=(2, 4, 5),
        last="before final norm",
        dtype="float32",
        engine="none",
        chunk_tokens=2,
        shard_tokens=4,
    )
    writer = StateWriter(path, header, ROWS)
    for shard in shards:
        span = header.span(shard)
        sizes_n = torch.arange(span.start, span.stop, dtype=torch.float32) + 1
        aux_n3H = sizes_n[:, None, None].expand(-1, 3, 4).clone()
        writer.write(shard, aux_n3H, sizes_n[:, None].expand(-1, 4).clone())
    return header


def test_refused_rows_are_counted_named_and_no_fault(run: Run, tmp_path: Path):
    path = tmp_path / "train.zarr"
    header = write_store(path, shards=[])
    writer, zeros = StateWriter(path, header, ROWS), torch.zeros(4, 3, 4)
    refused = Refused(row=ROWS.row_ids[1], start=3, stop=6, token=2, layer=4)
    writer.write(0, zeros, zeros[:, 0], [refused])
    writer.write(1, zeros[:2], zeros[:2, 0], [refused])

    _, info, _ = run(["store", "info", str(path), "--json"])
    code, verified, _ = run(["store", "verify", str(path), "--json"])
    _, said, _ = run(["store", "verify", str(path)])
    sampled, _, why = run(["store", "sample", str(path), "--row", "1"])

    assert json.loads(info)["refused_rows"] == 1
    named = {"row": ROWS.row_ids[1], "start": 3, "stop": 6, "token": 2, "layer": 4}
    assert (code, json.loads(verified)) == (0, {"ok": True, "faults": [], "refused": [named]})
    assert f"without row {ROWS.row_ids[1]} (from its token 2 on, state of layer 4)" in said
    assert sampled != 0
    assert "they were no numbers" in why


def test_info_has_the_size_and_the_identity_of_a_store(run: Run, tmp_path: Path):
    header = write_store(tmp_path / "eval.zarr")

    code, out, _ = run(["store", "info", str(tmp_path / "eval.zarr"), "--json"])

    facts = json.loads(out)
    assert code == 0
    sizes = {"tokens", "rows", "bytes", "raw_bytes", "ratio"}
    assert set(facts) == sizes | {"fingerprint", "target", "dtype", "refused_rows"}
    assert facts["dtype"] == "float32"
    assert (facts["tokens"], facts["rows"], facts["target"]) == (6, 2, "tiny")
    assert facts["raw_bytes"] == 6 * 4 * 4 * 4
    assert facts["fingerprint"] == header.fingerprint


def test_inspect_takes_stores_of_states_and_of_rows(run: Run, tmp_path: Path):
    write_store(tmp_path / "eval.zarr")

    _, states, _ = run(["inspect", str(tmp_path / "eval.zarr"), "--json"])
    _, rows, _ = run(["inspect", str(tmp_path / "eval.zarr" / "rows"), "--json"])

    assert json.loads(states)["kind"] == "hidden states"
    assert json.loads(rows)["holds"] == {
        "rows": 2,
        "tokens": 6,
        "supervised_tokens": 3,
        "domains": {"chat": 1, "code": 1},
    }


def test_verify_of_a_whole_store_says_yes(run: Run, tmp_path: Path):
    write_store(tmp_path / "eval.zarr")

    code, out, _ = run(["store", "verify", str(tmp_path / "eval.zarr"), "--json"])

    assert (code, json.loads(out)) == (0, {"ok": True, "faults": [], "refused": []})


def test_verify_names_the_shard_and_rows_of_a_changed_byte(run: Run, tmp_path: Path):
    path = tmp_path / "eval.zarr"
    write_store(path)
    shard = path / "last" / "c.1.0.0"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)

    code, out, _ = run(["store", "verify", str(path), "--json"])

    (fault,) = json.loads(out)["faults"]
    assert code == 1
    assert (fault["shard"], fault["file"]) == (1, "last/c.1.0.0")
    assert (fault["tokens"], fault["rows"]) == ([4, 6], ["second"])


def test_verify_names_a_file_of_the_whole_store_whose_bytes_changed(run: Run, tmp_path: Path):
    path = tmp_path / "eval.zarr"
    write_store(path)
    tokens = path / "rows" / "tokens" / "c" / "0"
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)

    code, out, _ = run(["store", "verify", str(path), "--json"])
    _, shown, _ = run(["store", "verify", str(path)])

    (fault,) = json.loads(out)["faults"]
    assert code == 1
    assert (fault["shard"], fault["file"]) == (None, "rows/tokens/c/0")
    assert "all" in shown


def test_verify_of_an_unfinished_store_says_no_with_the_command_to_go_on(run: Run, tmp_path: Path):
    path = tmp_path / "eval.zarr"
    write_store(path, shards=[0])

    code, out, _ = run(["store", "verify", str(path), "--json"])

    (fault,) = json.loads(out)["faults"]
    assert code == 1
    assert "1 of its 2 shards are done; run `dvc repro extract`" in fault["what"]


def test_verify_of_no_store_is_bad_input(run: Run, tmp_path: Path):
    code, out, err = run(["store", "verify", str(tmp_path), "--json"])

    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_sample_shows_tokens_and_sizes_of_the_states_of_a_row(run: Run, tmp_path: Path):
    write_store(tmp_path / "eval.zarr")
    command = ["store", "sample", str(tmp_path / "eval.zarr"), "--row", "1", "--tokens", "2"]

    code, out, _ = run([*command, "--json"])
    _, shown, _ = run(command)

    facts = json.loads(out)
    assert code == 0
    assert (facts["row_id"], facts["domain"], facts["tokens"]) == ("second", "code", 3)
    assert facts["sample"] == [
        {"position": 0, "token": 5, "supervised": False, "rms": [4.0] * 4},
        {"position": 1, "token": 8, "supervised": False, "rms": [5.0] * 4},
    ]
    assert "row second (code), 3 tokens" in shown


def test_a_row_that_a_store_does_not_have_names_those_it_has(run: Run, tmp_path: Path):
    write_store(tmp_path / "eval.zarr")

    code, _, err = run(["store", "sample", str(tmp_path / "eval.zarr"), "--row", "2"])

    assert code == 2
    assert "has rows 0 to 1" in err


def test_all_three_take_a_store_in_a_bucket_and_a_folder_that_points_to_it(
    run: Run, tmp_path: Path
):
    with s3_server():
        bucket, url = TestBucket(), "s3://states/run/eval.zarr"
        header = write_store(url)
        pointer = Pointer(
            url=url, fingerprint=header.fingerprint, sha256=StateStore.open(url).sha256
        )
        pointer.save(tmp_path / "eval.zarr")
        for path in (url, str(tmp_path / "eval.zarr")):
            _, info, _ = run(["store", "info", path, "--json"])
            _, sample, _ = run(["store", "sample", path, "--row", "1", "--json"])
            verified, _, _ = run(["store", "verify", path, "--json"])
            bucket.flip("run/eval.zarr/last/c.1.0.0")
            damaged, faults, _ = run(["store", "verify", path, "--json"])
            bucket.restore()

            assert json.loads(info)["fingerprint"] == header.fingerprint
            assert json.loads(sample)["row_id"] == "second"
            assert (verified, damaged) == (0, 1)
            assert json.loads(faults)["faults"][0]["file"] == "last/c.1.0.0"
        _, inspected, _ = run(["inspect", str(tmp_path / "eval.zarr"), "--json"])
        assert json.loads(inspected)["fingerprint"] == header.fingerprint
        code, out, err = run(["store", "verify", "s3://nowhere/eval.zarr", "--json"])

    assert (code, out) == (2, "")
    assert "there is no bucket nowhere" in err
