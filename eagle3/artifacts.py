"""The records that stages hand on: what each stage makes, and where it lies."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from eagle3.comparison import SharedCosts, SizeFigures, Verdict
from eagle3.config import VocabSize
from eagle3.records import Artifact, file_sha256, fingerprint_of, write_atomically

# One place to import from: whoever needs a record needs this module alone.
__all__ = [
    "HELD_OUT",
    "SPLITS",
    "Artifact",
    "Corpus",
    "Decision",
    "DraftVocab",
    "Drafter",
    "Evaluation",
    "HiddenStates",
    "Serving",
    "Split",
    "TargetModel",
    "file_sha256",
    "fingerprint_of",
    "write_atomically",
]

Split = Literal["train", "validation", "eval"]
SPLITS: tuple[Split, ...] = ("train", "validation", "eval")
HELD_OUT: tuple[Split, ...] = ("validation", "eval")
"""Splits that no drafter trains on."""


class TargetModel(Artifact):
    """The model to be sped up: its shape, and where its weights lie."""

    stage: ClassVar[str] = "target"
    home: ClassVar[Path] = Path("data/target")

    source: str
    revision: str
    weights_sha256: str
    files_sha256: str
    """Of everything but the weights: config, tokenizer, chat template, code."""
    weights_folder: str
    """Where config, tokenizer and weights lie; relative to the manifest's folder or absolute."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    aux_layers: tuple[int, int, int]
    trust_remote_code: bool

    def folder(self, home: Path) -> Path:
        """The Hugging Face folder, for a manifest that lies in `home`."""
        return (home / self.weights_folder).resolve()


class Corpus(Artifact):
    """Rows of tokens with loss masks, in three splits; see `eagle3.store.rows`."""

    stage: ClassVar[str] = "corpus"
    home: ClassVar[Path] = Path("data/corpus")

    tokens: dict[Split, int]
    supervised_tokens: dict[Split, int]
    rows: dict[Split, int]
    sha256: dict[Split, str]
    counts: dict[str, int]
    """Conversations `read`, dropped by reason, and `kept`: the first is the sum of the others. Of
    the kept, `truncated` and `retokenised` ones."""

    @property
    def figures(self) -> dict[str, float]:
        """Sizes of the splits, and what became of the conversations that were read."""
        values: dict[str, float] = {f"corpus_{fate}": count for fate, count in self.counts.items()}
        for split in SPLITS:
            values[f"rows_{split}"] = self.rows[split]
            values[f"tokens_{split}"] = self.tokens[split]
            values[f"supervised_tokens_{split}"] = self.supervised_tokens[split]
        return values


class HiddenStates(Artifact):
    """Hidden states of the target over the corpus, row for row; see `eagle3.store.states`.

    With `keep` false the train split's are not among them: training makes and deletes them itself
    (`eagle3.stream`), and all figures here are of the other splits.
    """

    stage: ClassVar[str] = "extract"
    home: ClassVar[Path] = Path("data/hidden_states")

    keep: bool
    aux_layers: tuple[int, int, int]
    hidden_size: int
    tokens: dict[Split, int]
    dtype: dict[Split, str]
    engine: str
    sha256: dict[Split, str]
    refused_rows: dict[Split, int]
    """Rows without states, since one of theirs was no number; none of eval."""
    bytes: dict[Split, int]
    raw_bytes: dict[Split, int]
    """What the same states take as they are."""

    @property
    def ratio(self) -> float:
        """Bytes at rest over raw bytes."""
        return sum(self.bytes.values()) / max(1, sum(self.raw_bytes.values()))

    @property
    def figures(self) -> dict[str, float]:
        """Sizes of the stores, and how many rows they lack."""
        values: dict[str, float] = {"store_ratio": self.ratio}
        for split in self.tokens:
            values[f"store_tokens_{split}"] = self.tokens[split]
            values[f"store_bytes_{split}"] = self.bytes[split]
            values[f"refused_rows_{split}"] = self.refused_rows[split]
        return values


class DraftVocab(Artifact):
    """A draft vocabulary: `vocab.safetensors` with d2t and t2d, `coverage.json` beside it."""

    stage: ClassVar[str] = "vocab"

    size: VocabSize
    draft_vocab: int
    target_vocab: int
    always_kept: int
    sha256: str
    coverage: dict[str, float]

    @staticmethod
    def home(size: VocabSize) -> Path:
        """Folder of the vocabulary of a size."""
        return Path(f"data/vocab/{size}")

    @staticmethod
    def curve_home(size: VocabSize) -> Path:
        """Coverage against size, for the plots."""
        return Path(f"reports/coverage/{size}.csv")

    @property
    def figures(self) -> dict[str, float]:
        """What it covers, of all splits, by split and by domain, and its size."""
        return {**self.coverage, "draft_vocab": self.draft_vocab, "always_kept": self.always_kept}


class Drafter(Artifact):
    """A trained drafter in the plain engine format, with this record beside it."""

    stage: ClassVar[str] = "train"
    manifest: ClassVar[str] = "eagle3.json"

    size: VocabSize
    draft_vocab: int
    best_step: int
    acceptance_length_validation: float
    refused_rows: int
    """Rows of the training split that had no states, of those that were made or read."""
    trainable_parameters: int
    sha256: str
    params: dict[str, Any]

    @staticmethod
    def home(size: VocabSize) -> Path:
        """Folder of the drafter of a size."""
        return Path(f"models/{size}")

    @staticmethod
    def curve_home(size: VocabSize) -> Path:
        """Loss and acceptance by step, for the plots."""
        return Path(f"reports/training/{size}.csv")

    @property
    def figures(self) -> dict[str, float]:
        """What training ended with."""
        return {
            "acceptance_length_validation": self.acceptance_length_validation,
            "best_step": self.best_step,
            "refused_rows_train": self.refused_rows,
            "trainable_parameters": self.trainable_parameters,
        }


class Evaluation(Artifact):
    """Acceptance and cost of one drafter; `evaluation.json` beside it has all, by domain."""

    stage: ClassVar[str] = "evaluate"
    overall: ClassVar[str] = "overall"
    """Stands where a domain's name does in `evaluation.json`, for all domains together."""

    size: VocabSize
    draft_vocab: int
    metrics: dict[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """The metrics."""
        return self.metrics

    @staticmethod
    def home(size: VocabSize) -> Path:
        """Folder of the evaluation of a size."""
        return Path(f"reports/evaluation/{size}")


class Serving(Artifact):
    """One drafter inside a serving engine; `serving.json` beside it has every run."""

    stage: ClassVar[str] = "serve"
    nowhere: ClassVar[str] = "none"
    """Stands where an engine's name does for a drafter that was not served."""

    size: VocabSize
    draft_vocab: int
    engine: str
    dtype: str
    draft_sampling: Literal["probabilistic", "greedy", "none"]
    """How the engine drafted for sampled answers: probabilistic (rejection sampling) or greedy."""
    metrics: dict[str, float]

    @property
    def was_served(self) -> bool:
        """Whether an engine ran; without one there are no metrics."""
        return self.engine != self.nowhere

    @property
    def figures(self) -> dict[str, float]:
        """The metrics."""
        return self.metrics

    @staticmethod
    def home(size: VocabSize) -> Path:
        """Folder of the serving of a size."""
        return Path(f"reports/serving/{size}")


class Decision(Artifact):
    """The comparison of draft vocabularies; `decision.md` and `plots/` beside it are for people."""

    stage: ClassVar[str] = "compare"
    home: ClassVar[Path] = Path("reports")
    manifest: ClassVar[str] = "decision.json"

    draft_tokens: tuple[int, ...]
    sizes: tuple[SizeFigures, ...]
    shared: SharedCosts
    verdicts: tuple[Verdict, ...]
    """For each k, the fastest size against each of the others; none for a single size."""

    @property
    def headline_k(self) -> int:
        """The k of views with room for one: 3, what engines are mostly run with, if measured."""
        return 3 if 3 in self.draft_tokens else self.draft_tokens[0]

    def closest(self, k: int) -> Verdict | None:
        """The winner at k against the runner-up."""
        return min(
            (verdict for verdict in self.verdicts if verdict.k == k),
            key=lambda verdict: verdict.advantage,
            default=None,
        )

    @property
    def figures(self) -> dict[str, float]:
        """The winner's draft vocabulary and its advantage over the runner-up, by k."""
        draft_vocab = {figures.size: figures.draft_vocab for figures in self.sizes}
        values: dict[str, float] = {}
        for k in self.draft_tokens:
            if verdict := self.closest(k):
                values[f"winner_draft_vocab_k{k}"] = draft_vocab[verdict.winner]
                values[f"winner_advantage_k{k}"] = verdict.advantage
        return values
