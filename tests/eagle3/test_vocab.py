"""The draft vocabulary: the rule that chooses it, the maps' invariants, and the stage's files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3.artifacts import Corpus, DraftVocab, Split, TargetModel, file_sha256
from eagle3.config import TargetParams, VocabParams
from eagle3.errors import ArtifactError, VocabError
from eagle3.maps import VocabMaps, full_vocab, load_maps, require_agreement
from eagle3.store.rows import Rows, rows_sha256, save_rows
from eagle3.target import bring_target, load_tokenizer, special_and_chat_token_ids
from eagle3.vocab import build_draft_vocab, count_tokens, coverage, coverage_curve, select_vocab

# Rows of the splits: domain, tokens, how many of the last tokens are the answer.
TEXTS: dict[Split, list[tuple[str, list[int], int]]] = {
    "train": [("chat", [1, 300, 301, 301, 302, 2], 4), ("code", [1, 310, 311, 2], 2)],
    "validation": [("chat", [1, 300, 301, 2], 2)],
    "eval": [("chat", [1, 300, 301, 319, 2], 3), ("code", [1, 310, 311, 2], 2)],
}


def rows_of(texts: list[tuple[str, list[int], int]]) -> Rows:
    return Rows(
        tokens_N=np.array([token for _, tokens, _ in texts for token in tokens], dtype=np.int32),
        loss_mask_N=np.array(
            [i >= len(t) - answer for _, t, answer in texts for i in range(len(t))], dtype=np.bool_
        ),
        offsets_R1=np.cumsum([0, *(len(tokens) for _, tokens, _ in texts)], dtype=np.int64),
        domains=tuple(domain for domain, _, _ in texts),
        row_ids=tuple(f"row{number}" for number in range(len(texts))),
    )


@pytest.fixture
def target(
    tiny_target_params: TargetParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TargetModel:
    monkeypatch.chdir(tmp_path)
    return bring_target(tiny_target_params, TargetModel.home)


@pytest.fixture
def corpus(target: TargetModel) -> Corpus:
    rows = {split: rows_of(texts) for split, texts in TEXTS.items()}
    for split, each in rows.items():
        save_rows(each, Corpus.home / f"{split}.zarr")
    return Corpus(
        made_from={"target": target.fingerprint},
        tokens={split: each.num_tokens for split, each in rows.items()},
        supervised_tokens={split: int(each.loss_mask_N.sum()) for split, each in rows.items()},
        rows={split: len(each) for split, each in rows.items()},
        sha256={split: rows_sha256(each) for split, each in rows.items()},
        counts={},
    )


def params_of(keep_special: bool, *keep_tokens: str) -> VocabParams:
    return VocabParams(sizes=(10,), keep_special=keep_special, keep_tokens=keep_tokens)


def test_draft_ids_map_back_to_the_most_frequent_target_tokens() -> None:
    maps = build_draft_vocab(torch.tensor([5, 0, 9, 1, 7]), draft_size=3, keep_ids=[])

    assert maps.ids_D.tolist() == [0, 2, 4]
    assert maps.d2t_D.tolist() == [0, 1, 2]
    assert maps.t2d_V.tolist() == [True, False, True, False, True]
    assert maps.to_draft_V.tolist() == [0, -1, 1, -1, 2]


def test_equal_counts_go_to_the_lower_id() -> None:
    maps = build_draft_vocab(torch.tensor([3, 7, 3, 3, 7]), draft_size=3, keep_ids=[])

    assert maps.ids_D.tolist() == [0, 1, 4]


def test_unused_ids_fill_up_from_the_lowest() -> None:
    maps = build_draft_vocab(torch.tensor([0, 0, 0, 0, 4, 0]), draft_size=3, keep_ids=[])

    assert maps.ids_D.tolist() == [0, 1, 4]


def test_kept_tokens_take_the_places_of_the_least_frequent() -> None:
    maps = build_draft_vocab(torch.tensor([5, 0, 9, 1, 7]), draft_size=3, keep_ids=[1, 3])

    assert maps.ids_D.tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_maps_of_any_corpus_agree_and_no_left_out_token_is_more_frequent(seed: int) -> None:
    draw = np.random.default_rng(seed)
    target_vocab = int(draw.integers(2, 400))
    draft_size = int(draw.integers(1, target_vocab + 1))
    tokens = draw.zipf(1.3, size=int(draw.integers(1, 3000))) % target_vocab
    counts_V = torch.from_numpy(np.bincount(tokens, minlength=target_vocab))
    keep_ids = draw.choice(target_vocab, size=int(draw.integers(0, draft_size + 1)), replace=False)

    maps = build_draft_vocab(counts_V, draft_size, keep_ids.tolist())

    require_agreement(maps, "this test", "mend it")
    assert int(maps.t2d_V.sum()) == draft_size
    assert bool(maps.t2d_V[keep_ids].all())
    assert torch.equal(maps.to_draft_V[maps.ids_D], torch.arange(draft_size))
    assert torch.equal(maps.to_draft_V >= 0, maps.t2d_V)
    chosen_V = maps.t2d_V.clone()
    chosen_V[keep_ids] = False
    if chosen_V.any() and draft_size < target_vocab:
        assert counts_V[chosen_V].min() >= counts_V[~maps.t2d_V].max()


def test_the_full_vocabulary_is_the_identity() -> None:
    maps = full_vocab(5)

    assert maps.ids_D.tolist() == maps.to_draft_V.tolist() == [0, 1, 2, 3, 4]
    require_agreement(maps, "this test", "mend it")


def test_too_large_a_draft_vocabulary_names_the_key_to_lower() -> None:
    with pytest.raises(VocabError, match=r"vocab.sizes has 6, but the target has 5.*write full"):
        build_draft_vocab(torch.ones(5, dtype=torch.int64), draft_size=6, keep_ids=[])


def test_a_draft_vocabulary_smaller_than_what_is_kept_names_the_key_to_raise() -> None:
    with pytest.raises(VocabError, match=r"vocab.sizes has 2, but 3 .* raise the size to 3"):
        build_draft_vocab(torch.ones(5, dtype=torch.int64), draft_size=2, keep_ids=[0, 1, 2])


def test_only_answers_are_counted() -> None:
    counts_V = count_tokens(rows_of(TEXTS["train"]), 320)

    counted = {id_: int(counts_V[id_]) for id_ in counts_V.nonzero().flatten().tolist()}
    assert counted == {301: 2, 302: 1, 311: 1, 2: 2}


def test_a_token_beyond_the_target_is_refused() -> None:
    with pytest.raises(VocabError, match=r"token 311, .* ends at 309; run `dvc repro corpus`"):
        count_tokens(rows_of(TEXTS["train"]), 310)


def test_coverage_is_the_share_of_counted_tokens_inside() -> None:
    counts_V = torch.tensor([5, 0, 9, 1, 7])
    maps = build_draft_vocab(counts_V, draft_size=2, keep_ids=[])

    assert coverage(counts_V, maps) == pytest.approx(16 / 22)


def test_the_curve_passes_through_the_measured_size_and_ends_at_all() -> None:
    counts_V = torch.tensor([5, 0, 9, 1, 7] * 40)
    maps = build_draft_vocab(counts_V, draft_size=77, keep_ids=[1])
    curve = list(csv.DictReader(coverage_curve(counts_V, counts_V, [1], 77).splitlines()))

    by_size = {int(row["size"]): float(row["coverage_eval"]) for row in curve}
    assert by_size[77] == pytest.approx(coverage(counts_V, maps))
    assert by_size[200] == 1.0
    assert list(by_size.values()) == sorted(by_size.values())


@pytest.mark.parametrize(
    ("d2t", "t2d", "fault"),
    [
        ([0, 0, 3], [True, True, False, False], "leads outside"),
        ([0, 0, -1], [True, True, False, False], "do not rise"),
        ([0, 0], [True, False, True, False], "marks other tokens"),
        ([0, 0], [True, True, True, False], "marks other tokens"),
        ([], [False, False], "leads outside"),
    ],
)
def test_maps_that_disagree_are_refused(d2t: list[int], t2d: list[bool], fault: str) -> None:
    maps = VocabMaps(torch.tensor(d2t, dtype=torch.int64), torch.tensor(t2d))

    with pytest.raises(VocabError, match=rf"{fault}.*run `dvc repro --force vocab`"):
        require_agreement(maps, "here", "run `dvc repro --force vocab`")


def test_the_stage_leaves_maps_coverage_and_curve(target: TargetModel, corpus: Corpus) -> None:
    params = params_of(True, "~")
    vocab = select_vocab(target, corpus, params, 30, None, DraftVocab.home(30))
    maps = load_maps(vocab)

    tilde = load_tokenizer(target).get_vocab()["~"]
    keep = {*special_and_chat_token_ids(target), tilde}
    assert keep <= set(maps.ids_D.tolist())
    assert {301, 302, 311, 2} <= set(maps.ids_D.tolist())
    assert DraftVocab.load(DraftVocab.home(30)) == vocab
    assert (vocab.draft_vocab, vocab.target_vocab, vocab.always_kept) == (30, 320, len(keep))
    assert vocab.coverage["coverage_train"] == vocab.coverage["coverage_validation"] == 1.0
    assert vocab.coverage["coverage_eval"] == pytest.approx(4 / 5)
    assert vocab.coverage["coverage_eval_chat"] == pytest.approx(2 / 3)
    assert vocab.coverage["coverage_eval_code"] == 1.0
    assert vocab.coverage["coverage"] == pytest.approx(12 / 13)
    assert json.loads((DraftVocab.home(30) / "coverage.json").read_text()) == vocab.coverage
    assert vocab.figures["coverage_eval"] == vocab.coverage["coverage_eval"]
    assert DraftVocab.curve_home(30).read_text().startswith("size,coverage_train,coverage_eval\n")


def test_the_full_vocabulary_covers_everything(target: TargetModel, corpus: Corpus) -> None:
    vocab = select_vocab(target, corpus, params_of(True), "full", None, DraftVocab.home("full"))

    assert vocab.draft_vocab == 320
    assert set(vocab.coverage.values()) == {1.0}
    assert load_maps(vocab).ids_D.tolist() == list(range(320))


def test_without_keep_special_only_counts_decide(target: TargetModel, corpus: Corpus) -> None:
    vocab = select_vocab(target, corpus, params_of(False), 5, None, DraftVocab.home(5))

    assert load_maps(vocab).ids_D.tolist() == [0, 2, 301, 302, 311]


def test_a_token_to_keep_that_nobody_knows_is_named(target: TargetModel, corpus: Corpus) -> None:
    with pytest.raises(VocabError, match=r"vocab.keep_tokens has '<\|none\|>'.*spell it as"):
        select_vocab(target, corpus, params_of(True, "<|none|>"), 30, None, DraftVocab.home(30))


def test_a_corpus_of_another_target_is_refused(target: TargetModel, corpus: Corpus) -> None:
    other = corpus.model_copy(update={"made_from": {"target": "0" * 64}})

    with pytest.raises(ArtifactError, match=r"run `dvc repro corpus`"):
        select_vocab(target, other, params_of(True), 30, None, DraftVocab.home(30))


def test_the_same_corpus_gives_the_same_bytes(target: TargetModel, corpus: Corpus) -> None:
    first = select_vocab(target, corpus, params_of(True), 30, None, DraftVocab.home(30))
    again = select_vocab(target, corpus, params_of(True), 30, None, DraftVocab.home(30))

    assert first == again


def test_maps_that_were_changed_on_disk_are_refused(target: TargetModel, corpus: Corpus) -> None:
    vocab = select_vocab(target, corpus, params_of(True), 30, None, DraftVocab.home(30))
    path = DraftVocab.home(30) / "vocab.safetensors"
    maps = full_vocab(320)
    save_file({"d2t": maps.d2t_D, "t2d": maps.t2d_V}, path)

    with pytest.raises(VocabError, match=r"not the file that .*run `dvc repro --force vocab`"):
        load_maps(vocab)
    path.write_bytes(b"no safetensors")
    with pytest.raises(VocabError, match=r"is damaged .*run `dvc repro --force vocab`"):
        load_maps(vocab.model_copy(update={"sha256": file_sha256(path)}))
    path.unlink()
    with pytest.raises(VocabError, match=r"does not exist; run `dvc repro vocab`"):
        load_maps(vocab)
