"""From whatever a source wrote to one kind of conversation, checked, cleaned and hashed."""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]

# ShareGPT's names beside OpenAI's.
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}


class MalformedRow(Exception):
    """A row that is no conversation; the message is the reason, `where` is added by the caller."""


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns in order: maybe one system turn, then user and assistant in alternation.

    Once the assistant's turns are taken out, user turns follow each other: the target answers them.
    """

    messages: tuple[Message, ...]
    domain: str
    where: str
    """File and line, or package and number: for messages to people."""

    @cached_property
    def prompt_hash(self) -> str:
        """Identity of what is asked (system and user turns): decides the split."""
        return _digest([turn for turn in self.messages if turn.role != "assistant"])

    @cached_property
    def row_id(self) -> str:
        """Identity of all turns."""
        return _digest(self.messages)

    def asked(self) -> "Conversation":
        """The same conversation without answers."""
        kept = tuple(turn for turn in self.messages if turn.role != "assistant")
        return Conversation(kept, self.domain, self.where)

    @property
    def answered(self) -> bool:
        """Whether the source brought an answer."""
        return any(turn.role == "assistant" for turn in self.messages)

    def up_to_last_answer(self) -> "Conversation":
        """The same conversation without a last question that the source leaves open."""
        open_end = self.answered and self.messages[-1].role == "user"
        kept = self.messages[:-1] if open_end else self.messages
        return Conversation(kept, self.domain, self.where)


def parse_conversation(record: Any, domain: str, where: str) -> Conversation:
    """Read a record with `messages`, `conversations` or `prompt`.

    A conversation that asks nothing has no messages: the caller counts it as empty.

    Raises:
        MalformedRow: another shape, an unknown role, or turns out of order.
    """
    if not isinstance(record, Mapping):
        raise MalformedRow(f"a row must be a JSON object, found {_short(record)}")
    turns = [turn for turn in _turns(record) if turn.content or turn.role != "system"]
    if any(turn.role == "user" and not turn.content for turn in turns) or not turns:
        return Conversation((), domain, where)
    _check_order(turns)
    return Conversation(tuple(_before_blank_answer(turns)), domain, where)


def _turns(record: Mapping[str, Any]) -> list[Message]:
    if "messages" in record:
        return _messages(record["messages"], "messages", "role", "content")
    if "conversations" in record:
        return _messages(record["conversations"], "conversations", "from", "value")
    if "prompt" in record:
        return [Message("user", _clean(record["prompt"], "prompt"))]
    keys = ", ".join(sorted(map(str, record))) or "none"
    raise MalformedRow(f"no `messages`, `conversations` or `prompt` (keys found: {keys})")


def _messages(turns: Any, key: str, role_key: str, content_key: str) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise MalformedRow(f"`{key}` must be a list of turns, found {_short(turns)}")
    read = []
    for index, turn in enumerate(turns):
        place = f"{key}[{index}]"
        if not isinstance(turn, Mapping) or role_key not in turn or content_key not in turn:
            raise MalformedRow(
                f"{place} must have `{role_key}` and `{content_key}`, found {_short(turn)}"
            )
        role = turn[role_key]
        if not isinstance(role, str) or role not in ROLES:
            raise MalformedRow(
                f"{place} has the unknown role {role!r}; known are {', '.join(ROLES)}"
            )
        read.append(Message(ROLES[role], _clean(turn[content_key], place)))
    return read


def _clean(content: Any, place: str) -> str:
    """One spelling of the same text: NFC, newlines as \\n, no space around it."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text_part(part, place) for part in content)
    if not isinstance(content, str):
        raise MalformedRow(f"{place} must be text, found {_short(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(
            f"{place} holds half a character (a lone surrogate): {error.reason}"
        ) from error
    text = unicodedata.normalize("NFC", content)
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _text_part(part: Any, place: str) -> str:
    """OpenAI's content parts: only text can be learned from here."""
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return part["text"]
    raise MalformedRow(f"{place} has a part that is not text: {_short(part)}")


def _before_blank_answer(turns: list[Message]) -> list[Message]:
    """What comes after an answer that says nothing depends on nothing: leave it out."""
    for index, turn in enumerate(turns):
        if turn.role == "assistant" and not turn.content:
            return turns[:index]
    return turns


def _check_order(turns: list[Message]) -> None:
    spoken = turns[1:] if turns[0].role == "system" else turns
    if not spoken:
        raise MalformedRow("only a system turn; a conversation needs a user turn")
    for index, turn in enumerate(spoken):
        due = "user" if index % 2 == 0 else "assistant"
        if turn.role != due:
            raise MalformedRow(
                f"turn {index + len(turns) - len(spoken) + 1} is from {turn.role}, but {due} is "
                "due: after the system turn, user and assistant alternate"
            )


def _digest(turns: Sequence[Message]) -> str:
    text = json.dumps([[turn.role, turn.content] for turn in turns], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
