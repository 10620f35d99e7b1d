"""The target answers conversations, unit by unit; what is answered survives a kill.

A finished unit is one line of a journal, forced to disk. The next start takes every whole line and
answers the rest; since units and their seeds follow from the conversations alone, the result equals
an uninterrupted run's.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3.corpus.normalise import Conversation, Message
from eagle3.corpus.template import ChatTemplate, TokenRow
from eagle3.engines.base import Sampling, TextEngine
from eagle3.errors import CorpusError
from eagle3.work import fsync_folder, room_for

log = logging.getLogger(__name__)


def answer_conversations(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    engine: TextEngine,
    sampling: Sampling,
    batch_size: int,
    max_length: int,
    journal: Path,
    told: Callable[[int], None],
    keep: Callable[[dict[str, TokenRow]], None] | None = None,
) -> dict[str, TokenRow]:
    """Rows by row id, each user turn answered by the target; `told` hears how many are done.

    `keep` is given every unit before it counts as answered: after a kill it may get one again.
    Rows are not cut yet; a prompt that fills `max_length` alone is not answered.
    """
    units = plan_units(conversations, template, batch_size)
    rows = read_journal(journal)
    for unit in units:
        if any(conversation.row_id not in rows for conversation in unit):
            answered = answer_unit(unit, template, engine, sampling, max_length)
            if keep is not None:
                keep(answered)
            append_to_journal(journal, answered)
            rows |= answered
        told(len(rows))
    return rows


def plan_units(
    conversations: Sequence[Conversation], template: ChatTemplate, batch_size: int
) -> list[list[Conversation]]:
    """Conversations that are answered together: as many turns, and prompts of like length."""

    def size(conversation: Conversation) -> tuple[int, int, str]:
        first = template.asked(_first_question(conversation))
        return len(conversation.messages), len(first.tokens), conversation.row_id

    units: list[list[Conversation]] = []
    for _, alike in groupby(sorted(conversations, key=size), key=lambda c: len(c.messages)):
        rest = list(alike)
        units += [rest[start : start + batch_size] for start in range(0, len(rest), batch_size)]
    return units


def answer_unit(
    unit: Sequence[Conversation],
    template: ChatTemplate,
    engine: TextEngine,
    sampling: Sampling,
    max_length: int,
) -> dict[str, TokenRow]:
    """Let the target answer every user turn, with its own earlier answers in the history."""
    rows = {c.row_id: template.asked(_first_question(c)) for c in unit}
    questions = {c.row_id: list(c.messages[len(_first_question(c)) :]) for c in unit}
    waiting = list(rows)
    while waiting := [row_id for row_id in waiting if len(rows[row_id].tokens) < max_length]:
        seed = unit_seed(sampling.seed, waiting, turn=len(rows[waiting[0]].messages))
        prompts = [rows[row_id].tokens for row_id in waiting]
        answers = engine.generate(prompts, replace(sampling, seed=seed))
        for row_id, answer in zip(waiting, answers, strict=True):
            rows[row_id] = template.answered(rows[row_id], answer)
        waiting = [row_id for row_id in waiting if questions[row_id]]
        for row_id in waiting:
            rows[row_id] = template.asked_again(rows[row_id], questions[row_id].pop(0))
    return rows


def unit_seed(seed: int, row_ids: Sequence[str], turn: int) -> int:
    """The seed of one call: its own, and the same however often work is begun again."""
    digest = hashlib.sha256(json.dumps([seed, list(row_ids), turn]).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def append_to_journal(journal: Path, rows: dict[str, TokenRow]) -> None:
    """Add a finished unit, durably: after this returns, no kill undoes it."""
    line = json.dumps({row_id: _to_json(row) for row_id, row in rows.items()})
    with room_for("answers", journal.parent), journal.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(journal.parent)


def read_journal(journal: Path) -> dict[str, TokenRow]:
    """Rows of all finished units; a last line that a kill tore is cut off the file.

    Raises:
        CorpusError: an earlier line is damaged.
    """
    if not journal.exists():
        return {}
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        log.info("cut %d bytes of unfinished work off %s", len(content) - whole, journal)
        os.truncate(journal, whole)
    rows: dict[str, TokenRow] = {}
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            rows |= {row_id: _from_json(row) for row_id, row in json.loads(line).items()}
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{journal} line {number} is damaged ({error}); delete the file and run "
                "`dvc repro corpus` again"
            ) from error
    return rows


def _first_question(conversation: Conversation) -> tuple[Message, ...]:
    """The turns up to the first user turn."""
    count = 2 if conversation.messages[0].role == "system" else 1
    return conversation.messages[:count]


def _to_json(row: TokenRow) -> dict[str, Any]:
    return {
        "messages": [[turn.role, turn.content] for turn in row.messages],
        "tokens": row.tokens,
        "loss_mask": "".join("01"[supervised] for supervised in row.loss_mask),
        "retokenised": row.retokenised,
    }


def _from_json(value: dict[str, Any]) -> TokenRow:
    return TokenRow(
        tuple(Message(role, content) for role, content in value["messages"]),
        "",
        tuple(value["tokens"]),
        tuple(digit == "1" for digit in value["loss_mask"]),
        value["retokenised"],
    )
