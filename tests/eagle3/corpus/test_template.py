"""The loss mask on templates of several families, read back as text."""

from collections.abc import Callable

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from eagle3.corpus.normalise import Message
from eagle3.corpus.template import ChatTemplate, TokenRow
from eagle3.errors import CorpusError

SYSTEM = Message("system", "Be short.")
CHAT = (
    SYSTEM,
    Message("user", "What is tea?"),
    Message("assistant", "A drink."),
    Message("user", "And a fox?"),
    Message("assistant", "Not a drink."),
)
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + %s + '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TRIMS = "{% for m in messages %}" + TURN % "m['content'] | trim" + "{% endfor %}" + ASK
# Older answers lose their thinking; as Qwen3 and DeepSeek-R1 do.
FORGETS = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}" + TURN % "c" + "{% endfor %}" + ASK
)
# A space before the answer that is not in the prompt; as Mistral's.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SILENT = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
NO_SYSTEM = "{{ raise_exception('System role not supported') }}"


@pytest.fixture
def template_of(tiny_target) -> Callable[..., ChatTemplate]:
    def build(template: str | None = None) -> ChatTemplate:
        tokenizer = AutoTokenizer.from_pretrained(tiny_target)
        tokenizer.chat_template = template or tokenizer.chat_template
        return ChatTemplate(tokenizer, [0, 2])

    return build


def supervised_texts(template: ChatTemplate, row: TokenRow) -> list[str]:
    """The text of each run of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for token, supervised in zip(row.tokens, row.loss_mask, strict=True):
        if supervised:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = supervised
    return [template.decode(run) for run in runs]


def ids(template: ChatTemplate, text: str) -> list[int]:
    return list(template.encode(text))


def test_every_answer_with_its_end_token_and_nothing_else_is_supervised(template_of):
    template = template_of()
    row = template.told(CHAT)

    assert supervised_texts(template, row) == ["A drink.<|im_end|>", "Not a drink.<|im_end|>"]
    whole = template.render(CHAT, ask=False)
    assert template.decode(row.tokens) == whole.removesuffix("\n")


def test_rows_of_told_conversations_are_tokenised_as_the_whole_text(template_of):
    template = template_of()

    whole = template.encode(template.render(CHAT, ask=False).removesuffix("\n"))
    assert template.told(CHAT).tokens == whole


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (TRIMS, ["A drink.<|im_end|>", "Not a drink.<|im_end|>"]),
        (FORGETS, ["A drink.<|im_end|>", "Not a drink.<|im_end|>"]),
        (BRACKETS, [" A drink.<|im_end|>", " Not a drink.<|im_end|>"]),
        (NO_END, [" A drink.", " Not a drink."]),
    ],
)
def test_answers_are_found_in_templates_of_other_families(template_of, source, answers):
    template = template_of(source)

    assert supervised_texts(template, template.told(CHAT)) == answers


def test_a_tokenizer_without_offsets_gives_the_same_mask():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = TRIMS.replace("<|im_end|>", "</s>")
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])

    answers = ["A drink.</s>", "Not a drink.</s>"]
    assert supervised_texts(template, template.told(CHAT)) == answers


def test_an_answer_that_repeats_the_question_is_supervised_once(template_of):
    template = template_of()
    chat = (Message("user", "assistant"), Message("assistant", "assistant"))

    assert supervised_texts(template, template.told(chat)) == ["assistant<|im_end|>"]


def test_older_thinking_that_the_template_drops_is_not_supervised_but_the_last_is(template_of):
    template = template_of(FORGETS)
    first = Message("assistant", "<think>Hm</think>A drink.")
    last = Message("assistant", "<think>Ah</think>No.")
    chat = (CHAT[1], first, CHAT[3], last)

    answers = ["A drink.<|im_end|>", "<think>Ah</think>No.<|im_end|>"]
    assert supervised_texts(template, template.told(chat)) == answers


def test_generated_tokens_are_kept_as_they_were_written(template_of):
    template = template_of()
    # Letter by letter: other tokens than the tokenizer would use for this text.
    answer = [token for letter in "A drink." for token in ids(template, letter)] + [2]
    assert answer != ids(template, "A drink.<|im_end|>")

    row = template.answered(template.asked(CHAT[:2]), answer)
    assert row.messages[-1] == CHAT[2]
    row = template.asked_again(row, CHAT[3])
    row = template.answered(row, ids(template, "Not a drink.<|im_end|>"))

    assert not row.retokenised
    prompt = template.encode(template.render(CHAT[:2], ask=True))
    assert list(row.tokens[: len(prompt) + len(answer)]) == [*prompt, *answer]
    assert row.supervised == len(answer) + len(ids(template, "Not a drink.<|im_end|>"))
    assert template.decode(row.tokens) == template.render(CHAT, ask=False).removesuffix("\n")


def test_an_answer_without_end_token_gets_an_unsupervised_one_before_the_next_turn(template_of):
    template = template_of()
    row = template.answered(template.asked(CHAT[:2]), ids(template, "A drink."))
    row = template.asked_again(row, CHAT[3])

    assert supervised_texts(template, row) == ["A drink."]
    assert template.decode(row.tokens) == template.render(CHAT[:4], ask=True)


@pytest.mark.parametrize(
    ("source", "written", "shown"),
    [
        (TRIMS, "A drink.\n<|im_end|>", "A drink.<|im_end|>"),
        (FORGETS, "<think>Hm</think>A drink.<|im_end|>", "A drink.<|im_end|>"),
        (None, "A drink.<|endoftext|>", "A drink.<|im_end|>"),
    ],
)
def test_a_history_that_the_template_rewrites_is_tokenised_again(
    template_of, source, written, shown
):
    template = template_of(source)
    row = template.answered(template.asked(CHAT[:2]), ids(template, written))
    assert supervised_texts(template, row) == [written]
    row = template.asked_again(row, CHAT[3])

    assert row.retokenised
    assert supervised_texts(template, row) == [shown]
    assert template.decode(row.tokens) == template.render(row.messages, ask=True)
    assert template.answered(row, ids(template, "No.<|im_end|>")).retokenised


def test_a_cut_row_keeps_its_first_tokens(template_of):
    row = template_of().told(CHAT)

    assert row.cut(9).tokens == row.tokens[:9]
    assert row.cut(9).supervised == sum(row.loss_mask[:9])


def test_a_template_that_leaves_answers_out_is_refused(template_of):
    with pytest.raises(CorpusError, match=r"yields no supervised token.*mend chat_template\.jinja"):
        template_of(SILENT)


def test_a_template_that_refuses_a_role_says_which_conversations_to_remove(template_of):
    refuses = "{% if messages[0]['role'] == 'system' %}" + NO_SYSTEM + "{% endif %}" + TRIMS
    template = template_of(refuses)

    with pytest.raises(CorpusError, match="of system, user: System role not supported; remove"):
        template.asked((SYSTEM, CHAT[1]))
