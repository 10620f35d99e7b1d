from pathlib import Path

import pytest

from eagle3.corpus.answers import answer_conversations, plan_units, read_journal
from eagle3.corpus.normalise import Conversation, Message
from eagle3.corpus.template import ChatTemplate, TokenRow
from eagle3.engines.base import Sampling
from eagle3.errors import CorpusError
from eagle3.target import end_token_ids, load_tokenizer

SAMPLED = Sampling(temperature=0.8, top_p=1.0, max_new_tokens=6, seed=0)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=6, seed=0)
LONG = 500


def asked(*questions: str, system: str | None = None) -> Conversation:
    turns = [Message("system", system)] if system else []
    turns += [Message("user", question) for question in questions]
    return Conversation(tuple(turns), "chat", "here")


CHATS = [
    asked("What is tea?"),
    asked("Why do people like our street?", "And a fox?"),
    asked("Who knows?", system="Be short."),
    asked("Tell me of the moon and the river."),
    asked("How old is a clock?", "Why?", "Who?", system="Be kind."),
]


@pytest.fixture
def template(target) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(target), end_token_ids(target))


def answer(template, engine, journal: Path, chats=CHATS, sampling=SAMPLED, max_length=LONG):
    return answer_conversations(
        chats, template, engine, sampling, 2, max_length, journal, lambda done: None
    )


def shown(row: TokenRow) -> tuple:
    return row.messages, row.tokens, row.loss_mask, row.retokenised


def test_units_hold_conversations_of_as_many_turns_and_like_length(template):
    units = plan_units(CHATS, template, batch_size=2)

    assert [[len(c.messages) for c in unit] for unit in units] == [[1, 1], [2, 2], [4]]
    assert units == plan_units(CHATS[::-1], template, batch_size=2)


def test_the_target_answers_every_user_turn_with_its_own_answers_in_the_history(
    template, counted, tmp_path
):
    engine = counted()
    rows = answer(template, engine, tmp_path / "journal", chats=[CHATS[4]])

    row = rows[CHATS[4].row_id]
    assert [turn.role for turn in row.messages] == ["system"] + ["user", "assistant"] * 3
    prompts = [call[0][0] for call in engine.calls]
    assert [prompt == list(row.tokens[: len(prompt)]) for prompt in prompts] == [True] * 3
    assert row.supervised == len(row.tokens) - sum(
        1 for supervised in row.loss_mask if not supervised
    )
    assert not any(row.loss_mask[: len(prompts[0])])
    assert row.loss_mask[len(prompts[0])]


def test_greedy_rows_hold_exactly_what_the_target_says_to_their_prompt(template, counted, tmp_path):
    engine = counted()
    rows = answer(template, engine, tmp_path / "journal", chats=[CHATS[0]], sampling=GREEDY)

    row = rows[CHATS[0].row_id]
    prompt = list(template.asked(CHATS[0].messages).tokens)
    (written,) = engine.generate([prompt], GREEDY)
    assert list(row.tokens) == prompt + written


def test_each_call_has_its_own_seed_and_the_same_one_when_begun_again(template, counted, tmp_path):
    first, second = counted(), counted()
    answer(template, first, tmp_path / "one")
    answer(template, second, tmp_path / "two")

    seeds = [sampling.seed for _, sampling in first.calls]
    assert len(set(seeds)) == len(seeds) == 6
    assert seeds == [sampling.seed for _, sampling in second.calls]


def test_work_that_was_stopped_anywhere_goes_on_to_the_same_rows(template, counted, tmp_path):
    whole = answer(template, counted(), tmp_path / "whole")
    for stop_after in range(6):
        journal = tmp_path / f"stopped-{stop_after}"
        with pytest.raises(KeyboardInterrupt):
            answer(template, counted(stop_after), journal)
        resumed = answer(template, counted(), journal)
        assert {id_: shown(row) for id_, row in resumed.items()} == {
            id_: shown(row) for id_, row in whole.items()
        }
        assert journal.read_bytes() == (tmp_path / "whole").read_bytes()


def test_finished_units_are_not_answered_again(template, counted, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        answer(template, counted(3), tmp_path / "journal")
    rest = counted()
    answer(template, rest, tmp_path / "journal")
    assert len(rest.calls) == 3
    nothing = counted()
    answer(template, nothing, tmp_path / "journal")
    assert nothing.calls == []


@pytest.mark.parametrize("torn_bytes", [1, 2, 40])
def test_a_torn_last_line_is_cut_off_and_answered_again(template, counted, tmp_path, torn_bytes):
    journal = tmp_path / "journal"
    answer(template, counted(), journal)
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-torn_bytes])

    answer(template, counted(), journal)
    assert journal.read_bytes() == whole


def test_a_damaged_line_names_the_file_to_delete(tmp_path):
    journal = tmp_path / "journal"
    journal.write_text('{"row": {}}\n{}\n')

    with pytest.raises(CorpusError, match=r"journal line 1 is damaged .*delete the file"):
        read_journal(journal)


def test_a_prompt_that_fills_the_row_is_not_answered(template, counted, tmp_path):
    engine = counted()
    rows = answer(template, engine, tmp_path / "journal", max_length=10)

    assert engine.calls == []
    assert not any(row.supervised for row in rows.values())


def test_a_full_row_is_not_asked_further(template, counted, tmp_path):
    chat = CHATS[4]
    prompt = len(template.asked(chat.messages[:2]).tokens)
    engine = counted()
    rows = answer(template, engine, tmp_path / "journal", chats=[chat], max_length=prompt + 1)

    assert len(engine.calls) == 1
    assert any(rows[chat.row_id].loss_mask[: prompt + 1])
