import json
from pathlib import Path

import pytest

from eagle3.artifacts import SPLITS
from eagle3.config import CorpusParams
from eagle3.corpus.split import DROPPED, Gathered, gather
from eagle3.errors import CorpusError

QUESTIONS = [f"Question {number}?" for number in range(200)]


def write_jsonl(path: Path, records: list) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def jsonl(path: Path, split: str = "by-hash", limit: int | None = None, domain: str = "chat"):
    return {"kind": "jsonl", "path": str(path), "domain": domain, "split": split, "limit": limit}


def corpus_params(sources: list, by: str = "target", max_malformed: int = 0) -> CorpusParams:
    answers = {
        "backend": "transformers",
        "by": by,
        "temperature": 0.8,
        "top_p": 1.0,
        "max_new_tokens": 8,
        "seed": 0,
        "batch_size": 4,
    }
    return CorpusParams.model_validate(
        {
            "sources": sources,
            "answers": answers,
            "max_length": 64,
            "max_malformed": max_malformed,
            "validation_fraction": 0.1,
            "eval_fraction": 0.2,
        }
    )


def prompts(path: Path, questions: list[str]) -> Path:
    return write_jsonl(path, [{"prompt": question} for question in questions])


def questions_of(gathered: Gathered) -> dict[str, set[str]]:
    return {
        split: {conversation.messages[0].content for conversation in gathered.by_split[split]}
        for split in SPLITS
    }


def everything(gathered: Gathered) -> int:
    kept = sum(len(gathered.by_split[split]) for split in SPLITS)
    return kept + sum(gathered.counts[reason] for reason in DROPPED)


def test_splits_have_about_their_share_and_share_no_prompt(tmp_path):
    found = questions_of(gather(corpus_params([jsonl(prompts(tmp_path / "a", QUESTIONS))])))

    assert 25 <= len(found["eval"]) <= 55
    assert 10 <= len(found["validation"]) <= 32
    assert set.union(*found.values()) == set(QUESTIONS)
    assert sum(map(len, found.values())) == len(QUESTIONS)


def test_added_rows_move_no_conversation_to_another_split(tmp_path):
    before = gather(corpus_params([jsonl(prompts(tmp_path / "a", QUESTIONS[:100]))]))
    more = gather(corpus_params([jsonl(prompts(tmp_path / "b", QUESTIONS[::-1]))]))

    for split in SPLITS:
        assert questions_of(before)[split] <= questions_of(more)[split]


def test_the_order_of_rows_does_not_change_the_result(tmp_path):
    one = gather(corpus_params([jsonl(prompts(tmp_path / "a", QUESTIONS), limit=50)]))
    other = gather(corpus_params([jsonl(prompts(tmp_path / "b", QUESTIONS[::-1]), limit=50)]))

    for split in SPLITS:
        ids = [conversation.row_id for conversation in one.by_split[split]]
        assert ids == [conversation.row_id for conversation in other.by_split[split]] == sorted(ids)


def test_a_limit_leaves_something_for_every_split(tmp_path):
    gathered = gather(corpus_params([jsonl(prompts(tmp_path / "a", QUESTIONS), limit=60)]))

    assert all(gathered.by_split[split] for split in SPLITS)
    assert gathered.counts["over_limit"] == 140


def test_an_added_row_displaces_at_most_one_from_a_limited_source(tmp_path):
    before = gather(corpus_params([jsonl(prompts(tmp_path / "a", QUESTIONS), limit=60)]))
    after = gather(corpus_params([jsonl(prompts(tmp_path / "b", [*QUESTIONS, "New?"]), limit=60)]))

    lost = set.union(*questions_of(before).values()) - set.union(*questions_of(after).values())
    assert len(lost) <= 1


def test_held_out_prompts_are_kept_from_the_other_sources_wherever_they_stand(tmp_path):
    chats = prompts(tmp_path / "chats", QUESTIONS[:50])
    held_out = prompts(tmp_path / "held-out", QUESTIONS[40:60])
    gathered = gather(
        corpus_params([jsonl(chats), jsonl(held_out, split="eval", limit=5, domain="held")])
    )

    found = questions_of(gathered)
    assert gathered.counts["held_out_duplicates"] == 10
    assert not found["train"] & set(QUESTIONS[40:60])
    # Held out even beyond the limit: raising it later must not find a prompt trained on.
    assert gathered.counts["over_limit"] == 15
    held = [c for c in gathered.by_split["eval"] if c.domain == "held"]
    assert len(held) == 5


def test_exact_duplicates_are_dropped_and_the_first_source_keeps_the_row(tmp_path):
    first = prompts(tmp_path / "a", ["One?", "Two?", "One? "])
    second = prompts(tmp_path / "b", ["Two?", "Three?"])
    gathered = gather(corpus_params([jsonl(first, domain="a"), jsonl(second, domain="b")]))

    domains = {
        conversation.messages[0].content: conversation.domain
        for split in SPLITS
        for conversation in gathered.by_split[split]
    }
    assert domains == {"One?": "a", "Two?": "a", "Three?": "b"}
    assert gathered.counts["duplicates"] == 2


def test_every_row_read_has_one_fate(tmp_path):
    answer = {"role": "assistant", "content": "Yes"}
    rows: list = [{"prompt": question} for question in QUESTIONS[:60]]
    rows += ["{broken", {"prompt": ""}, {"prompt": QUESTIONS[3]}]
    asked = ["Held?", *QUESTIONS[60:90]]
    rows += [{"messages": [{"role": "user", "content": q}, answer]} for q in asked]
    chats = write_jsonl(tmp_path / "chats", rows)
    held_out = prompts(tmp_path / "held", ["Held?", "Held?"])
    sources = [jsonl(chats, limit=40), jsonl(held_out, split="eval")]

    for by in ("target", "dataset"):
        gathered = gather(corpus_params(sources, by=by, max_malformed=1))
        assert gathered.counts["read"] == len(rows) + 2 == everything(gathered)
        for reason in ("malformed", "empty", "duplicates", "held_out_duplicates"):
            assert gathered.counts[reason] >= 1, reason


def test_the_targets_answers_replace_the_sources_in_every_split(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "Yes"}]}
        for q in QUESTIONS
    ]
    gathered = gather(corpus_params([jsonl(write_jsonl(tmp_path / "a", chats))]))

    assert not any(c.answered for split in SPLITS for c in gathered.by_split[split])


def test_a_dataset_answers_its_training_rows_only(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer}]}
        for q in QUESTIONS
        for answer in ("Yes", "No")
    ]
    chats.append({"prompt": "Open question without an answer?"})
    gathered = gather(corpus_params([jsonl(write_jsonl(tmp_path / "a", chats))], by="dataset"))

    train, validation = gathered.by_split["train"], gathered.by_split["validation"]
    assert all(c.answered for c in train)
    # Two answers to one question are two training rows, but one prompt to be answered.
    assert len(train) == 2 * len({c.prompt_hash for c in train})
    assert not any(c.answered for c in [*validation, *gathered.by_split["eval"]])
    assert len(validation) == len({c.prompt_hash for c in validation})


def test_a_malformed_row_names_file_line_reason_and_the_key_to_raise(tmp_path):
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": "Hi"}, "{broken"])

    with pytest.raises(
        CorpusError,
        match=r"chats\.jsonl line 2: not JSON: .* raise corpus\.max_malformed \(0\) to skip it",
    ):
        gather(corpus_params([jsonl(chats)]))


def test_more_malformed_rows_than_allowed_stop_at_the_first_too_many(tmp_path):
    wizard = {"messages": [{"role": "wizard", "content": "Hi"}]}
    chats = write_jsonl(tmp_path / "chats.jsonl", ["{broken", "{broken", wizard])

    assert gather(corpus_params([jsonl(chats)], max_malformed=3)).counts["malformed"] == 3
    with pytest.raises(CorpusError, match=r"line 3: .*unknown role 'wizard'"):
        gather(corpus_params([jsonl(chats)], max_malformed=2))
