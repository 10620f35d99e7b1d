import sys
from pathlib import Path
from types import ModuleType

import pytest

from eagle3.config import HuggingFaceSource
from eagle3.corpus.readers import read_jsonl, read_source
from eagle3.errors import CorpusError

ULTRACHAT = HuggingFaceSource(
    kind="huggingface",
    name="owner/chats",
    revision="0123abc",
    subset="train_sft",
    domain="chat",
    split="by-hash",
    limit=None,
)


def test_jsonl_rows_are_named_by_file_and_line_and_blank_lines_are_none(tmp_path: Path):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')

    assert [(row.where, row.record) for row in read_jsonl(file)] == [
        (f"{file} line 1", {"prompt": "a"}),
        (f"{file} line 3", {"prompt": "b"}),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at column"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13"),
        (b"[" * 200_000, "nested too deep"),
    ],
)
def test_a_line_that_cannot_be_read_is_a_row_with_a_fault(tmp_path: Path, line, fault):
    file = tmp_path / "chats.jsonl"
    file.write_bytes(line + b'\n{"prompt": "b"}\n')

    broken, whole = read_jsonl(file)
    assert fault in (broken.fault or "")
    assert whole.record == {"prompt": "b"}


def test_a_missing_file_names_the_key_to_mend(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"nowhere\.jsonl cannot be read .*corpus\.sources"):
        list(read_jsonl(tmp_path / "nowhere.jsonl"))


def test_without_the_datasets_package_a_hub_source_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(CorpusError, match="pip install datasets"):
        list(read_source(ULTRACHAT))


def test_a_hub_source_reads_its_subset_at_its_revision(monkeypatch):
    asked = []
    datasets = ModuleType("datasets")

    def load_dataset(name, revision, split):
        asked.append((name, revision, split))
        return [{"messages": [{"role": "user", "content": "Hi"}], "prompt_id": "1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", datasets)

    (row,) = read_source(ULTRACHAT)
    assert asked == [("owner/chats", "0123abc", "train_sft")]
    assert row.where == "owner/chats (train_sft) row 1"
    assert row.record["messages"][0]["content"] == "Hi"
