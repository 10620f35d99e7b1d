"""A conversation as the target reads it: the chat template's text, its tokens, and the loss mask.

The mask is True on what the target says: its answers and the end-of-turn token after each. It comes
from where the template puts the answers, never from token offsets, which slow tokenizers lack.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from eagle3.corpus.normalise import Message
from eagle3.errors import CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "Q7ANSWER{}Q7"


@dataclass(frozen=True)
class TokenRow:
    """A conversation in tokens, up to the last thing said; open to be gone on with."""

    messages: tuple[Message, ...]
    text: str
    """What the template renders of the messages, up to where the next answer starts."""
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    retokenised: bool
    """An earlier answer is no longer token for token what the target wrote."""

    @property
    def supervised(self) -> int:
        """Tokens that the drafter can learn from."""
        return sum(self.loss_mask)

    def cut(self, max_length: int) -> "TokenRow":
        """The first `max_length` tokens."""
        return TokenRow(
            self.messages,
            self.text,
            self.tokens[:max_length],
            self.loss_mask[:max_length],
            self.retokenised,
        )


class ChatTemplate:
    """The target's tokenizer and chat template.

    Raises:
        CorpusError: the template writes no answers, so nothing could be supervised.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_text = {token: self.decode([token]) for token in sorted(end_token_ids)}
        probe = (Message("user", "question"), Message("assistant", MARK.format(0)))
        if MARK.format(0) not in self.render(probe, ask=False):
            raise CorpusError(
                "the target's chat template yields no supervised token: it leaves out what the "
                "assistant says; mend chat_template.jinja of the target and run `dvc repro target`"
            )

    def render(self, messages: Sequence[Message], ask: bool) -> str:
        """The template's text; with `ask`, up to where the assistant's answer starts.

        Raises:
            CorpusError: the template refuses the messages (some allow no system turn).
        """
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=ask
                )
            )
        except TemplateError as error:
            roles = ", ".join(turn.role for turn in messages)
            raise CorpusError(
                f"the target's chat template refuses a conversation of {roles}: {error}; remove "
                "such conversations from corpus.sources"
            ) from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of rendered text: the template has already written all special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False, **options))

    def asked(self, messages: tuple[Message, ...]) -> TokenRow:
        """The row of a prompt: what the target is shown, nothing of it supervised."""
        text = self.render(messages, ask=True)
        tokens = self.encode(text)
        return TokenRow(messages, text, tokens, (False,) * len(tokens), retokenised=False)

    def answered(self, row: TokenRow, answer: Sequence[int]) -> TokenRow:
        """The row with the tokens that the target wrote, exactly as it wrote them."""
        said = answer[:-1] if answer and answer[-1] in self._end_text else answer
        return TokenRow(
            (*row.messages, Message("assistant", self.decode(said))),
            row.text,
            (*row.tokens, *answer),
            (*row.loss_mask, *(True for _ in answer)),
            row.retokenised,
        )

    def asked_again(self, row: TokenRow, question: Message) -> TokenRow:
        """An answered row, gone on to the next answer: the template's text between is appended.

        Where the template rewrites the answer (trims it, drops its thinking, ends it with another
        token), the target would see other tokens in its history than it wrote: then all is
        tokenised again from the rewritten text.
        """
        messages = (*row.messages, question)
        text = self.render(messages, ask=True)
        end = self._end_text.get(row.tokens[-1], "")
        history = row.text + row.messages[-1].content + end
        if not text.startswith(history):
            tokens, loss_mask = self._tokenise(messages, text)
            return TokenRow(messages, text, tokens, loss_mask, retokenised=True)
        glue = self._encode_after(end, text[len(history) :])
        return TokenRow(
            messages,
            text,
            (*row.tokens, *glue),
            (*row.loss_mask, *(False for _ in glue)),
            row.retokenised,
        )

    def told(self, messages: tuple[Message, ...]) -> TokenRow:
        """The row of a conversation whose answers the source brought, up to its last answer."""
        text = self.render(messages, ask=False)
        tokens, loss_mask = self._tokenise(messages, text)
        end = len(loss_mask)
        while end and not loss_mask[end - 1]:
            end -= 1
        return TokenRow(messages, text, tokens[:end], loss_mask[:end], retokenised=False)

    def _tokenise(
        self, messages: tuple[Message, ...], text: str
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokens of rendered text, and True on those of its answers."""
        tokens: tuple[int, ...] = ()
        loss_mask: tuple[bool, ...] = ()
        position = 0
        for start, end in [*self._answers(messages, text), (len(text), len(text))]:
            for stop, supervised in ((start, False), (end, True)):
                piece = self._encode_after(text[:position], text[position:stop])
                tokens += piece
                loss_mask += (supervised,) * len(piece)
                position = stop
        return tokens, loss_mask

    def _encode_after(self, before: str, text: str) -> tuple[int, ...]:
        """Tokens of text that stands after other text.

        Some tokenizers put a space before whatever comes first, so both are encoded together where
        the boundary keeps still.
        """
        head, both = self.encode(before), self.encode(before + text)
        return both[len(head) :] if both[: len(head)] == head else self.encode(text)

    def _answers(self, messages: tuple[Message, ...], text: str) -> list[tuple[int, int]]:
        """Where the answers stand in the text: from the prompt's end to after the end token.

        Empty when one cannot be found: then nothing of the conversation may be supervised.
        """
        between = self._between_answers(messages)
        places = [index for index, turn in enumerate(messages) if turn.role == "assistant"]
        if len(between) != len(places) + 1:
            return []
        found: list[tuple[int, int]] = []
        position = 0
        for index, before, after in zip(places, between, between[1:], strict=False):
            start = self._start_of_answer(text, position, messages[:index], before)
            stop = self._end_of_answer(text, start, after) if start >= 0 else -1
            if stop < 0:
                return []
            found.append((start, stop))
            position = stop
        return found

    def _between_answers(self, messages: tuple[Message, ...]) -> list[str]:
        """What the template writes before, between and after the answers, whatever they are."""
        marks = [MARK.format(index) for index in range(len(messages))]
        marked = [
            Message(turn.role, mark) if turn.role == "assistant" else turn
            for turn, mark in zip(messages, marks, strict=True)
        ]
        rest = self.render(marked, ask=messages[-1].role == "user")
        between = []
        for turn, mark in zip(messages, marks, strict=True):
            if turn.role == "assistant" and mark in rest:
                piece, rest = rest.split(mark, 1)
                between.append(piece)
        return [*between, rest]

    def _start_of_answer(
        self, text: str, position: int, asked: tuple[Message, ...], before: str
    ) -> int:
        """Where the target would have started to write; -1 if the template hides it."""
        prompt = self.render(asked, ask=True)
        if len(prompt) >= position and text.startswith(prompt):
            return len(prompt)
        # The template shows the history otherwise than it was when it was asked.
        before = before[len(self._end_of_turn(before)) :] if position else before
        return position + len(before) if text.startswith(before, position) else -1

    def _end_of_answer(self, text: str, start: int, after: str) -> int:
        end_of_turn = self._end_of_turn(after).strip()
        if end_of_turn:
            found = text.find(end_of_turn, start)
            return found + len(end_of_turn) if found >= 0 else -1
        # A template without an end token: the answer stops where the template goes on.
        return text.find(after, start) if after.strip() else len(text.rstrip())

    def _end_of_turn(self, after: str) -> str:
        """The end token, and the space before it, that stand first in what follows an answer."""
        for end in self._end_text.values():
            if end and after.lstrip().startswith(end):
                return after[: len(after) - len(after.lstrip()) + len(end)]
        return ""
