import pytest

from eagle3.corpus.normalise import Conversation, MalformedRow, Message, parse_conversation


def parse(record: object) -> Conversation:
    return parse_conversation(record, "chat", "chats.jsonl line 1")


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in conversation.messages]


def test_openai_sharegpt_and_bare_prompts_become_the_same_conversation():
    openai = {"messages": [{"role": "user", "content": "Hi"}]}
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}]}
    prompt = {"prompt": "Hi"}

    assert said(parse(openai)) == said(parse(sharegpt)) == said(parse(prompt)) == [("user", "Hi")]
    assert parse(openai).row_id == parse(sharegpt).row_id == parse(prompt).row_id


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]

    assert said(parse({"messages": [{"role": "user", "content": parts}]})) == [("user", "Hi you")]


def test_spelling_of_the_same_text_does_not_change_its_identity():
    composed, decomposed = "caf\u00e9\nau lait", "  cafe\u0301\r\nau lait\n"

    assert parse({"prompt": composed}).row_id == parse({"prompt": decomposed}).row_id


def test_answers_change_the_row_but_not_the_prompt():
    def chat(answer: str) -> Conversation:
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        return parse({"messages": turns})

    assert chat("Yes").row_id != chat("No").row_id
    assert chat("Yes").prompt_hash == chat("No").prompt_hash == chat("Yes").asked().row_id


def test_an_empty_system_turn_is_left_out():
    turns = [{"role": "system", "content": " "}, {"role": "user", "content": "Hi"}]

    assert said(parse({"messages": turns})) == [("user", "Hi")]


def test_what_follows_a_blank_answer_is_left_out():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Hello?"},
    ]

    assert said(parse({"messages": turns})) == [("user", "Hi")]


def test_an_open_last_question_is_left_out_only_where_there_are_answers():
    hi, yes, more = Message("user", "Hi"), Message("assistant", "Yes"), Message("user", "More")

    assert Conversation((hi, yes, more), "", "").up_to_last_answer().messages == (hi, yes)
    assert Conversation((hi,), "", "").up_to_last_answer().messages == (hi,)


@pytest.mark.parametrize(
    "record", [{"prompt": "  "}, {"messages": []}, {"messages": [{"role": "user", "content": ""}]}]
)
def test_a_conversation_that_asks_nothing_is_empty_not_malformed(record):
    assert parse(record).messages == ()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "must be a JSON object, found"),
        ({"text": "Hi"}, "no `messages`, `conversations` or `prompt`"),
        ({"prompt": 3}, "prompt must be text, found 3"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"messages": "Hi"}, "must be a list of turns"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] must have `role` and `content`"),
        (
            {"messages": [{"role": "wizard", "content": "Hi"}]},
            r"messages\[0\] has the unknown role 'wizard'; known are system, user",
        ),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [{"role": "system", "content": "Be kind"}]}, "needs a user turn"),
        ({"conversations": [{"from": "gpt", "value": "Hi"}]}, "turn 1 is from assistant"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "turn 2 is from user, but assistant is due",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "turn 2 is from system",
        ),
    ],
)
def test_a_malformed_row_says_what_is_wrong(record, reason):
    with pytest.raises(MalformedRow, match=reason):
        parse(record)
