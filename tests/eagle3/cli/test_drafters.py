import json
from pathlib import Path

import pytest
from drafter_folders import drafter, write_target

from eagle3.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, capsys.readouterr().out


def test_check_says_yes_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = drafter().write(tmp_path / "drafter")
    target = write_target(tmp_path / "target")

    code, text = run(capsys, "check", folder, "--target", target, "--json")
    assert (code, json.loads(text)) == (0, {"ok": True, "faults": []})
    assert run(capsys, "check", folder) == (0, f"{folder} keeps the contract\n")


def test_check_says_no_with_one_and_names_the_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = drafter()
    parts.tensors.pop("fc.weight")
    folder = parts.write(tmp_path / "drafter")

    code, text = run(capsys, "check", folder, "--json")
    answer = json.loads(text)
    assert (code, answer["ok"]) == (1, False)
    assert [sorted(fault) for fault in answer["faults"]] == [["fix", "what", "where"]]
    code, text = run(capsys, "check", folder)
    assert code == 1
    assert "fc.weight" in text


def test_check_of_no_folder_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "check", tmp_path / "nothing", "--json") == (2, "")


def test_export_writes_beside_the_folder_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drafter().write(tmp_path / "32000")
    target = write_target(tmp_path / "target")

    code, text = run(capsys, "export", folder, "--to", "speculators", "--target", target, "--json")
    out = tmp_path / "32000-speculators"
    assert (code, json.loads(text)) == (0, {"out": str(out), "format": "speculators"})
    assert (out / "model.safetensors").is_file()
    assert run(capsys, "check", out, "--target", target)[0] == 0


def test_import_lists_what_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = drafter()
    del parts.tensors["t2d"]
    folder = parts.write(tmp_path / "published")

    code, text = run(capsys, "import", folder, tmp_path / "out", "--layer-ids", "2,4,6", "--json")
    assert code == 0
    assert json.loads(text)["changes"] == ["built t2d from d2t"]


def test_import_refuses_layer_ids_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drafter().write(tmp_path / "published")

    assert run(capsys, "import", folder, tmp_path / "out", "--layer-ids", "low,high")[0] == 2
