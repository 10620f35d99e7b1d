"""The whole stage on a tiny target: chats in, token rows out."""

import json
from pathlib import Path

import pytest

from eagle3.artifacts import SPLITS, Corpus
from eagle3.config import CorpusParams, Params
from eagle3.corpus.build import build_corpus
from eagle3.corpus.split import DROPPED
from eagle3.errors import CorpusError
from eagle3.store.rows import load_rows, rows_sha256
from eagle3.target import load_tokenizer


def changed(params: CorpusParams, **changes: object) -> CorpusParams:
    """The same params, checked again, with other values; `answers__by` reaches inside."""
    raw = params.model_dump(mode="json")
    for key, value in changes.items():
        *path, last = key.split("__")
        place = raw
        for part in path:
            place = place[int(part) if part.isdecimal() else part]
        place[last] = value
    return CorpusParams.model_validate(raw)


@pytest.fixture
def params(tiny_params: Params) -> CorpusParams:
    return tiny_params.corpus


def read_people(out: Path = Corpus.home) -> list[dict]:
    lines = (out / "conversations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_record_agrees_with_the_rows_beside_it(target, params, engine, report):
    corpus = build_corpus(target, params, engine, Corpus.home, report)

    assert Corpus.load(Corpus.home) == corpus
    corpus.require_made_from(target, Corpus.home)
    for split in SPLITS:
        rows = load_rows(Corpus.home / f"{split}.zarr")
        assert corpus.rows[split] == len(rows) > 0
        assert corpus.tokens[split] == len(rows.tokens_N)
        assert corpus.supervised_tokens[split] == rows.loss_mask_N.sum() > 0
        assert corpus.sha256[split] == rows_sha256(rows)
        assert list(rows.row_ids) == sorted(rows.row_ids)
    assert set(load_rows(Corpus.home / "eval.zarr").domains) == {"chat", "held-out"}


def test_the_counts_add_up_and_show_in_the_figures(target, params, engine, report):
    chats = Path(params.sources[0].path)
    more = [{"prompt": ""}, {"prompt": "Is a road long?"}, {"prompt": "long " * 90}]
    lines = [*chats.read_text().splitlines() * 2, *map(json.dumps, more), "{broken"]
    chats.write_text("\n".join(lines))
    counts = build_corpus(
        target, changed(params, max_malformed=1, max_length=90), engine, Corpus.home, report
    ).counts

    assert counts["read"] == 2 * 40 + 4 + 2
    assert counts["read"] == counts["kept"] + sum(counts[reason] for reason in DROPPED)
    assert counts["duplicates"] == 40
    for reason in ("empty", "malformed", "held_out_duplicates", "no_supervised"):
        assert counts[reason] == 1, reason
    assert 0 < counts["truncated"] < counts["kept"]
    assert Corpus.load(Corpus.home).figures["corpus_kept"] == counts["kept"]


def test_rows_read_as_the_template_with_the_answers_masked(target, params, engine, report):
    build_corpus(target, params, engine, Corpus.home, report)

    tokenizer = load_tokenizer(target)
    people = {row["row_id"]: row for row in read_people()}
    rows = load_rows(Corpus.home / "train.zarr")
    for index, row_id in enumerate(rows.row_ids):
        span = rows.span(index)
        text = tokenizer.decode(rows.tokens_N[span])
        first = tokenizer.apply_chat_template(
            people[row_id]["messages"][:1], tokenize=False, add_generation_prompt=False
        )
        if people[row_id]["messages"][0]["role"] == "user":
            assert text.startswith(first.removesuffix("\n"))
        answers = [t["content"] for t in people[row_id]["messages"] if t["role"] == "assistant"]
        said = tokenizer.decode(rows.tokens_N[span][rows.loss_mask_N[span]])
        assert said.replace("<|im_end|>", "") == "".join(answers).replace("<|im_end|>", "")


@pytest.mark.parametrize("by", ["target", "dataset"])
def test_only_training_rows_are_sampled(target, params, counted, report, by):
    engine = counted()
    build_corpus(target, changed(params, answers__by=by), engine, Corpus.home, report)

    rows = {split: len(load_rows(Corpus.home / f"{split}.zarr")) for split in SPLITS}
    greedy = [prompts for prompts, sampling in engine.calls if sampling.temperature == 0]
    sampled = [prompts for prompts, sampling in engine.calls if sampling.temperature == 0.8]
    assert sum(map(len, greedy)) >= rows["validation"] + rows["eval"]
    assert bool(sampled) == (by == "target")


def test_a_datasets_own_answers_become_the_training_rows(target, params, engine, report):
    build_corpus(target, changed(params, answers__by="dataset"), engine, Corpus.home, report)

    given = Path(params.sources[0].path).read_text()
    train = [row for row in read_people() if row["split"] == "train"]
    for row in train:
        assert all(json.dumps(turn["content"]) in given for turn in row["messages"])


def test_a_stage_that_was_stopped_goes_on_and_gives_the_same_bytes(
    target, params, engine, counted, report
):
    whole = build_corpus(target, params, engine, Path("whole"), report)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(target, params, counted(2), Corpus.home, report)
    assert not Corpus.home.exists()

    rest = counted()
    resumed = build_corpus(target, params, rest, Corpus.home, report)
    assert resumed == whole
    assert (Corpus.home / "conversations.jsonl").read_bytes() == (
        Path("whole") / "conversations.jsonl"
    ).read_bytes()
    complete = counted()
    build_corpus(target, params, complete, Path("again"), report)
    assert len(rest.calls) == len(complete.calls) - 2
    assert not any(Path(".work").iterdir())


def test_other_params_do_not_go_on_from_foreign_answers(target, params, counted, report):
    with pytest.raises(KeyboardInterrupt):
        build_corpus(target, params, counted(2), Corpus.home, report)
    other = counted()
    build_corpus(target, changed(params, answers__seed=1), other, Corpus.home, report)
    complete = counted()
    build_corpus(target, changed(params, answers__seed=1), complete, Path("again"), report)

    assert len(other.calls) == len(complete.calls)


def test_progress_counts_conversations_up_to_all_of_them(target, params, engine, report):
    corpus = build_corpus(target, params, engine, Corpus.home, report)

    done = [entry[1] for entry in report.reported]
    assert done == sorted(done)
    assert report.reported[-1] == ("answers", *2 * (corpus.counts["kept"],), "conversations")


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"validation_fraction": 0.0}, "no validation conversation .*raise corpus.validation_fra"),
        ({"eval_fraction": 0.0, "sources__1__split": "by-hash"}, "no eval .*`split: eval`"),
        ({"sources__0__split": "eval"}, "no train conversation .*`split: by-hash`"),
        ({"max_length": 5}, r"no train row has a supervised token .*raise corpus.max_length \(5\)"),
    ],
)
def test_an_empty_split_names_the_params_that_fill_it(target, params, engine, report, changes, fix):
    with pytest.raises(CorpusError, match=fix):
        build_corpus(target, changed(params, **changes), engine, Corpus.home, report)


def test_sources_without_any_conversation_are_an_empty_corpus(target, params, engine, report):
    for source in params.sources:
        Path(source.path).write_text("\n")

    with pytest.raises(CorpusError, match=r"corpus is empty: corpus\.sources"):
        build_corpus(target, params, engine, Corpus.home, report)
