"""Which conversations are taken, and into which split each goes: by content, never by position."""

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass

from eagle3.artifacts import SPLITS, Split
from eagle3.config import CorpusParams, Source
from eagle3.corpus.normalise import Conversation, MalformedRow, parse_conversation
from eagle3.corpus.readers import RawRow, read_source
from eagle3.errors import CorpusError

log = logging.getLogger(__name__)

# Why a conversation that was read is not in the corpus; with `kept` they add up to `read`.
DROPPED = ("malformed", "empty", "duplicates", "held_out_duplicates", "over_limit", "no_supervised")


@dataclass(frozen=True)
class Gathered:
    """Conversations by split, in order of row id, and the count of every fate but the last."""

    by_split: dict[Split, list[Conversation]]
    counts: Counter[str]


def split_of(prompt_hash: str, params: CorpusParams) -> Split:
    """The split of a prompt: a fixed point of its content, so added rows move no other row."""
    # Hashed again: `limit` takes the lowest hashes, which would otherwise all fall into eval.
    digest = hashlib.sha256(f"split {prompt_hash}".encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64
    if point < params.eval_fraction:
        return "eval"
    if point < params.eval_fraction + params.validation_fraction:
        return "validation"
    return "train"


def gather(params: CorpusParams) -> Gathered:
    """Read every source, drop what is broken or twice there, and split the rest.

    Raises:
        CorpusError: a source is missing, or has more malformed rows than may be skipped.
    """
    gathered = Gathered({split: [] for split in SPLITS}, Counter())
    held_out: set[str] = set()
    taken: set[str] = set()
    # Held-out sources first: what they ask must not be trained on, wherever else it stands.
    for source in sorted(params.sources, key=lambda source: source.split != "eval"):
        found = _conversations(source, params, gathered.counts)
        if source.split == "eval":
            held_out.update(conversation.prompt_hash for _, conversation in found)
        for split, conversation in _choose(source, found, held_out, taken, gathered.counts):
            taken.add(conversation.row_id)
            gathered.by_split[split].append(conversation)
    for conversations in gathered.by_split.values():
        conversations.sort(key=lambda conversation: conversation.row_id)
    return gathered


def _conversations(
    source: Source, params: CorpusParams, counts: Counter[str]
) -> list[tuple[Split, Conversation]]:
    """Whole conversations of a source with their split, reduced to what will be rendered."""
    found: list[tuple[Split, Conversation]] = []
    for raw in read_source(source):
        counts["read"] += 1
        conversation = _parse(raw, source, params, counts)
        if conversation is None:
            continue
        if not conversation.messages:
            counts["empty"] += 1
            continue
        own_answers = params.answers.by == "dataset"
        if own_answers:
            # Before the split, so that what is trained on is what decided it.
            conversation = conversation.up_to_last_answer()
        split = "eval" if source.split == "eval" else split_of(conversation.prompt_hash, params)
        if own_answers and split == "train":
            counts["no_supervised"] += not conversation.answered
            found += [(split, conversation)] if conversation.answered else []
        else:
            found.append((split, conversation.asked()))
    return found


def _parse(
    raw: RawRow, source: Source, params: CorpusParams, counts: Counter[str]
) -> Conversation | None:
    try:
        if raw.fault:
            raise MalformedRow(raw.fault)
        return parse_conversation(raw.record, source.domain, raw.where)
    except MalformedRow as error:
        counts["malformed"] += 1
        if counts["malformed"] > params.max_malformed:
            raise CorpusError(
                f"{raw.where}: {error}. Mend the row, or raise corpus.max_malformed "
                f"({params.max_malformed}) to skip it"
            ) from error
        log.warning("skipped %s: %s", raw.where, error)
        return None


def _choose(
    source: Source,
    found: list[tuple[Split, Conversation]],
    held_out: set[str],
    taken: set[str],
    counts: Counter[str],
) -> list[tuple[Split, Conversation]]:
    """Drop what is there already, then take the lowest content hashes up to the limit."""
    fresh: dict[str, tuple[Split, Conversation]] = {}
    for split, conversation in found:
        if source.split != "eval" and conversation.prompt_hash in held_out:
            counts["held_out_duplicates"] += 1
        elif conversation.row_id in taken or conversation.row_id in fresh:
            counts["duplicates"] += 1
        else:
            fresh[conversation.row_id] = (split, conversation)
    ordered = [fresh[row_id] for row_id in sorted(fresh)]
    counts["over_limit"] += len(ordered[source.limit :]) if source.limit else 0
    return ordered[: source.limit]
