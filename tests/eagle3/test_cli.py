import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from eagle3.artifacts import Corpus, Decision
from eagle3.cli import main
from eagle3.comparison import SharedCosts, SizeFigures
from eagle3.config import Params
from eagle3.work import workspace

Run = Callable[[Sequence[str]], tuple[int, str, str]]

COMMANDS = [
    ["params"],
    ["plan"],
    ["inspect"],
    ["report"],
    ["check"],
    ["export"],
    ["import"],
    ["measure"],
    ["clean"],
    ["doctor"],
    ["store", "info"],
    ["store", "verify"],
    ["store", "sample"],
    ["engine", "start"],
    ["engine", "stop"],
    ["engine", "status"],
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `eagle3` in an empty project: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(arguments: Sequence[str]) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def write_params(params: Params, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(params.model_dump(mode="json")))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, command: list[str]):
    code, out, _ = run([*command, "--help"])

    assert code == 0
    assert f"Example: eagle3 {' '.join(command)}" in " ".join(out.split())
    assert "--json" in out


def test_params_of_a_preset_are_one_json_object(run: Run, tiny_params: Params):
    write_params(tiny_params, Path("presets/tiny.yaml"))

    code, out, err = run(["params", "--preset", "tiny", "--draft-vocab", "128", "--json"])

    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["total"] == answer["trainable"] + answer["frozen"]
    parameters = sum(tensor["parameters"] for tensor in answer["tensors"])
    assert parameters == answer["total"]


def test_params_without_a_preset_are_those_of_the_project(run: Run, tiny_params: Params):
    write_params(tiny_params, Path("params.yaml"))

    code, out, _ = run(["params", "--draft-vocab", "full"])

    assert code == 0
    assert "lm_head.weight" in out
    assert "320 x 32" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "no", "--draft-vocab", "8"], "there is no presets/no.yaml; known are tiny"),
        (["--preset", "tiny", "--draft-vocab", "big"], "write a positive number such as 32000"),
        (["--preset", "tiny", "--draft-vocab", "9999"], "must be below the target's 320"),
    ],
)
def test_bad_input_is_one_plain_line_and_exit_code_two(
    run: Run, tiny_params: Params, arguments: list[str], message: str
):
    write_params(tiny_params, Path("presets/tiny.yaml"))

    code, out, err = run(["params", *arguments, "--json"])

    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_inspect_says_what_a_folder_is_and_was_made_from(run: Run):
    corpus = Corpus(
        made_from={"target": "t" * 64},
        tokens={"train": 7},
        supervised_tokens={"train": 3},
        rows={"train": 1},
        sha256={"train": "a"},
        counts={},
    )
    corpus.save(Corpus.home)

    code, out, _ = run(["inspect", str(Corpus.home), "--json"])
    _, shown, _ = run(["inspect", str(Corpus.home)])

    answer = json.loads(out)
    assert code == 0
    assert (answer["kind"], answer["fingerprint"]) == ("corpus", corpus.fingerprint)
    assert answer["made_from"] == [
        {
            "stage": "target",
            "home": "data/target",
            "fingerprint": "t" * 64,
            "state": "missing",
        }
    ]
    assert "tokens.train" in shown
    assert "missing" in shown


def test_inspect_of_nothing_of_ours_is_bad_input(run: Run):
    code, out, err = run(["inspect", "nowhere", "--json"])

    assert (code, out) == (2, "")
    assert "is nothing that eagle3 makes" in err


def test_clean_removes_what_no_stage_can_use_and_keeps_the_rest(run: Run, tiny_params: Params):
    write_params(tiny_params, Path("params.yaml"))
    used = workspace("train@128", {"train": tiny_params.train.model_dump()})
    unused = workspace("train@64", {})
    (unused / "state").write_bytes(b"x" * 1000)

    code, out, err = run(["clean", "--yes", "--json"])

    answer = json.loads(out)
    assert code == 0
    assert answer["removed"] == [str(unused)]
    assert answer["kept"] == [str(used)]
    assert answer["bytes"] > 1000
    assert "vocab.sizes has no 64" in err
    assert used.exists()
    assert not unused.exists()


def test_clean_without_a_yes_removes_nothing(
    run: Run, tiny_params: Params, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    write_params(tiny_params, Path("params.yaml"))
    unused = workspace("train@64", {})

    code, _, err = run(["clean"])

    assert code == 1
    assert "Remove 1 folder(s)?" in err
    assert unused.exists()


def test_doctor_says_no_by_exit_code_where_a_run_would_fail(run: Run):
    code, out, _ = run(["doctor", "--json"])

    answer = json.loads(out)
    assert (code, answer["ok"]) == (1, False)
    faults = {f["check"]: f["fix"] for f in answer["findings"] if f["state"] == "fault"}
    assert faults["pins"] == "run `eagle3 doctor` in the project's folder"


def test_report_shows_the_last_decision(run: Run):
    size = SizeFigures(
        size="full",
        draft_vocab=320,
        coverage_train=1.0,
        coverage_eval=1.0,
        acceptance_length={3: 2.0},
        sampling_error={3: 0.1},
        acceptance_length_by_domain={"chat": {3: 2.0}},
        oov_miss_rate={3: 0.0},
        draft_layer_us=10.0,
        draft_head_us=10.0,
        target_step_us=100.0,
        head=0.1,
        speedup_projected={3: 1.25},
        served=None,
    )
    shared = SharedCosts(target_step_us=100.0, layer=0.1, verify={3: 1.0}, spread=0.0)
    decision = Decision(made_from={}, draft_tokens=(3,), sizes=(size,), shared=shared, verdicts=())
    decision.save(Decision.home)

    code, out, _ = run(["report"])
    _, as_json, _ = run(["report", "--json"])

    assert code == 0
    assert "k = 3: full alone, 1.250 times plain decoding" in out
    assert Decision.model_validate(json.loads(as_json)) == decision


def test_report_before_any_run_names_the_stage_to_run(run: Run):
    code, _, err = run(["report"])

    assert code == 2
    assert "run `dvc repro compare`" in err


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_project_without_a_server_says_so(run: Run, command: str):
    code, out, _ = run(["engine", command, "--json"])

    assert (code, json.loads(out)) == (1, {"ok": False})


def test_a_server_cannot_start_before_there_is_a_target(run: Run):
    code, _, err = run(["engine", "start"])

    assert code == 2
    assert "dvc repro target" in err
