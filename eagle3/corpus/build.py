"""The corpus stage: from sources and a target to rows of tokens in three splits."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.artifacts import SPLITS, Corpus, Split, TargetModel, fingerprint_of
from eagle3.config import CorpusParams
from eagle3.corpus.answers import answer_conversations
from eagle3.corpus.capture import AnswerCapture
from eagle3.corpus.normalise import Conversation
from eagle3.corpus.split import DROPPED, gather
from eagle3.corpus.template import ChatTemplate, TokenRow
from eagle3.engines.base import Sampling, TextEngine
from eagle3.errors import CorpusError
from eagle3.progress import Reporter
from eagle3.store.rows import Rows, rows_sha256, save_rows
from eagle3.target import end_token_ids, load_tokenizer
from eagle3.work import publish, room_for, workspace

log = logging.getLogger(__name__)

# What brings conversations into a split, for the message that says one has none.
FILLED_BY: dict[Split, str] = {
    "train": "add corpus.sources with `split: by-hash` or raise their limit",
    "validation": "raise corpus.validation_fraction, or the limit of the by-hash corpus.sources",
    "eval": "raise corpus.eval_fraction, or add a source with `split: eval` to corpus.sources",
}


def build_corpus(
    target: TargetModel,
    params: CorpusParams,
    engine: TextEngine,
    out: Path,
    report: Reporter,
    capture: AnswerCapture | None = None,
) -> Corpus:
    """Read, split, answer and tokenise; the result lies in `out`, its record written last.

    Rows of a split are in order of row id. Killed and started again, it goes on from the last
    finished batch of answers. With `capture`, the states of what the target answers are kept; the
    corpus is the same.

    Raises:
        CorpusError: a source is missing or malformed, or a split ends up empty.
    """
    gathered = gather(params)
    _require_every_split(gathered.by_split, params)
    template = ChatTemplate(load_tokenizer(target), end_token_ids(target))
    work = workspace("corpus", _made_of(target, params, engine, gathered.by_split))
    answered = _answer_all(gathered.by_split, params, template, engine, work, report, capture)
    counts = Counter(gathered.counts)
    rows = _finish(answered, params, counts)
    _require_supervision(gathered.by_split, rows, params)
    domains = {c.row_id: c.domain for split in SPLITS for c in gathered.by_split[split]}
    corpus = _write(target, rows, domains, counts, work / "result")
    publish(work / "result", out)
    shutil.rmtree(work)
    log.info("corpus: %s", ", ".join(f"{name} {count}" for name, count in corpus.counts.items()))
    return corpus


def _made_of(
    target: TargetModel,
    params: CorpusParams,
    engine: TextEngine,
    by_split: dict[Split, list[Conversation]],
) -> dict[str, Any]:
    """What unfinished answers are good for. The conversations stand for the sources' content."""
    return {
        "target": target.fingerprint,
        "params": params.model_dump(mode="json"),
        "engine": engine.name,
        "conversations": fingerprint_of(
            {split: [c.row_id for c in conversations] for split, conversations in by_split.items()}
        ),
    }


def _answer_all(
    by_split: dict[Split, list[Conversation]],
    params: CorpusParams,
    template: ChatTemplate,
    engine: TextEngine,
    work: Path,
    report: Reporter,
    capture: AnswerCapture | None,
) -> dict[Split, dict[str, TokenRow]]:
    """Whole rows of every split, in order of row id."""
    total = sum(map(len, by_split.values()))
    rows: dict[Split, dict[str, TokenRow]] = {}

    def progress(done: int) -> None:
        report.progress("answers", sum(map(len, rows.values())) + done, total, "conversations")

    for split in SPLITS:
        conversations = by_split[split]
        if split == "train" and params.answers.by == "dataset":
            rows[split] = {c.row_id: template.told(c.messages) for c in conversations}
        else:
            kept = capture.of(split) if capture else None
            found = answer_conversations(
                conversations,
                template,
                kept or engine,
                _sampling(split, params),
                params.answers.batch_size,
                params.max_length,
                work / f"answers-{split}.jsonl",
                progress,
                kept.keep if kept else None,
            )
            rows[split] = {c.row_id: found[c.row_id] for c in conversations}
        progress(0)
    return rows


def _sampling(split: Split, params: CorpusParams) -> Sampling:
    """Only training answers are sampled: acceptance is measured along the target's greedy text."""
    answers = params.answers
    if split == "train":
        return Sampling(answers.temperature, answers.top_p, answers.max_new_tokens, answers.seed)
    return Sampling(0.0, 1.0, answers.max_new_tokens, answers.seed)


def _finish(
    answered: dict[Split, dict[str, TokenRow]], params: CorpusParams, counts: Counter[str]
) -> dict[Split, dict[str, TokenRow]]:
    """Cut long rows, drop those with nothing left to learn from, and count both."""
    kept: dict[Split, dict[str, TokenRow]] = {split: {} for split in SPLITS}
    for split in SPLITS:
        for row_id, row in answered[split].items():
            short = row.cut(params.max_length)
            if not short.supervised:
                counts["no_supervised"] += 1
                continue
            counts["kept"] += 1
            counts["truncated"] += len(row.tokens) > params.max_length
            counts["retokenised"] += row.retokenised
            kept[split][row_id] = short
    return kept


def _require_every_split(by_split: dict[Split, list[Conversation]], params: CorpusParams) -> None:
    sizes = {split: len(by_split[split]) for split in SPLITS}
    found = ", ".join(f"{split} {size}" for split, size in sizes.items())
    empty = [split for split in SPLITS if not sizes[split]]
    if len(empty) == len(SPLITS):
        raise CorpusError(
            "the corpus is empty: corpus.sources bring no conversation; add one to them"
        )
    if empty:
        raise CorpusError(
            f"the corpus has no {empty[0]} conversation ({found}, by validation_fraction "
            f"{params.validation_fraction:g} and eval_fraction {params.eval_fraction:g}); "
            f"{FILLED_BY[empty[0]]}"
        )


def _require_supervision(
    by_split: dict[Split, list[Conversation]],
    rows: dict[Split, dict[str, TokenRow]],
    params: CorpusParams,
) -> None:
    for split in SPLITS:
        if not rows[split]:
            raise CorpusError(
                f"no {split} row has a supervised token ({len(by_split[split])} conversations were "
                f"rendered): raise corpus.max_length ({params.max_length}) above the prompts, or "
                "mend the target's chat template, which must write out what the assistant says"
            )


def _write(
    target: TargetModel,
    rows: dict[Split, dict[str, TokenRow]],
    domains: dict[str, str],
    counts: Counter[str],
    folder: Path,
) -> Corpus:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stored = {split: _rows(rows[split], domains) for split in SPLITS}
    with room_for("the corpus", folder):
        for split in SPLITS:
            save_rows(stored[split], folder / f"{split}.zarr")
        _write_for_people(rows, domains, folder / "conversations.jsonl")
        fates = ("read", *DROPPED, "kept", "truncated", "retokenised")
        corpus = Corpus(
            made_from={target.stage: target.fingerprint},
            tokens={split: len(stored[split].tokens_N) for split in SPLITS},
            supervised_tokens={split: int(stored[split].loss_mask_N.sum()) for split in SPLITS},
            rows={split: len(stored[split]) for split in SPLITS},
            sha256={split: rows_sha256(stored[split]) for split in SPLITS},
            counts={fate: counts[fate] for fate in fates},
        )
        assert counts["read"] == counts["kept"] + sum(counts[fate] for fate in DROPPED), counts
        corpus.save(folder)
    return corpus


def _rows(rows: dict[str, TokenRow], domains: dict[str, str]) -> Rows:
    lengths = [len(row.tokens) for row in rows.values()]
    return Rows(
        tokens_N=_flat([row.tokens for row in rows.values()], np.int32),
        loss_mask_N=_flat([row.loss_mask for row in rows.values()], np.bool_),
        offsets_R1=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        domains=tuple(domains[row_id] for row_id in rows),
        row_ids=tuple(rows),
    )


def _flat(ragged: Sequence[Sequence[int]], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in ragged])


def _write_for_people(
    rows: dict[Split, dict[str, TokenRow]], domains: dict[str, str], path: Path
) -> None:
    """One JSON object a row: the conversation as text, answers included."""
    with path.open("w", encoding="utf-8") as file:
        for split in SPLITS:
            for row_id, row in rows[split].items():
                shown = {
                    "row_id": row_id,
                    "split": split,
                    "domain": domains[row_id],
                    "tokens": len(row.tokens),
                    "supervised_tokens": row.supervised,
                    "messages": [
                        {"role": turn.role, "content": turn.content} for turn in row.messages
                    ],
                }
                file.write(json.dumps(shown, ensure_ascii=False) + "\n")
