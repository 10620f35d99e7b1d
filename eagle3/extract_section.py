"""The `extract` section of params.yaml: the store of hidden states, and how it is filled."""

import re
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from eagle3.sections import Backend, Dtype, NonNegative, Positive, Section, StateDtype


class ExtractParams(Section):
    """The hidden-state store."""

    backend: Backend = Field(description="What the target runs in; as for corpus.answers.")
    state_dtype: StateDtype = Field(
        description="At rest, for train and validation; float8 keeps 8 bits of each value and one "
        "scale per token and layer, and is not exact."
    )
    eval_state_dtype: Dtype = Field(
        description="At rest, for eval; float32 lets replay equal the real loop exactly."
    )
    chunk_tokens: Positive = Field(description="Tokens per Zarr chunk, the unit of reading.")
    shard_tokens: Positive = Field(
        description="Tokens per Zarr shard, the unit of writing and resuming."
    )
    store: str | None = Field(
        description="s3://bucket/prefix for the states; null keeps them in data/hidden_states."
    )
    keep: bool = Field(
        description="true keeps the states of all splits. false keeps those of validation and eval "
        "alone: train makes the training split's while it trains, once for each of vocab.sizes, "
        "and deletes a shard when no later step reads it."
    )
    ahead_shards: Positive = Field(
        description="With keep false: shards that the target may be ahead of training, all of "
        "them on disk."
    )
    max_nonfinite_rows: NonNegative = Field(
        description="Rows of train, and as many of validation, that may have a state that is no "
        "number; they are left out. One more fails the stage, and one of eval always does."
    )
    workers: Positive = Field(
        description="Processes that share the shards, each with its own target; more than one run "
        "on Ray."
    )
    ray_address: str | None = Field(
        description="HOST:PORT of a Ray cluster's head; null starts Ray here, if workers need it."
    )
    capture_answers: bool = Field(
        description="Keep the states of what the target answers while it answers, in the corpus "
        "stage; extract then runs the target over the other rows alone."
    )

    how_it_runs: ClassVar[frozenset[str]] = frozenset(
        {"workers", "ray_address", "ahead_shards", "max_nonfinite_rows"}
    )
    """Keys that change no byte of the store: DVC does not track them, and work goes on under
    others."""

    @field_validator("store")
    @classmethod
    def _store_is_a_bucket(cls, store: str | None) -> str | None:
        if store is None or re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[\w.=-]+)+", store):
            return store
        raise ValueError(
            "write s3://bucket/prefix or null; credentials come from AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or ~/.aws/credentials, another server from AWS_ENDPOINT_URL"
        )

    @model_validator(mode="after")
    def _ray_runs_transformers(self) -> Self:
        if self.on_ray and self.backend != "transformers":
            raise ValueError(
                f"extract.workers ({self.workers}) and extract.ray_address ({self.ray_address}) "
                f"run transformers, but extract.backend is {self.backend}; set it to "
                "transformers, or workers to 1 and ray_address to null"
            )
        return self

    @model_validator(mode="after")
    def _ray_keeps_what_it_makes(self) -> Self:
        if self.on_ray and not self.keep:
            raise ValueError(
                f"extract.keep is false, but extract.workers ({self.workers}) and "
                f"extract.ray_address ({self.ray_address}) run Ray: one target beside the trainer "
                "makes the training split then; set workers to 1 and ray_address to null, or keep "
                "to true"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_captured_for_one_process(self) -> Self:
        if self.capture_answers and self.on_ray:
            raise ValueError(
                "extract.capture_answers keeps states for one process, but extract.workers is "
                f"{self.workers} and ray_address {self.ray_address}; set capture_answers to "
                "false, or the others to 1 and null"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_captured_for_a_store_that_is_kept(self) -> Self:
        if self.capture_answers and not self.keep:
            raise ValueError(
                "extract.capture_answers keeps states for the extract stage, but extract.keep is "
                "false, so that train makes the training split's anew; set one of them the other "
                "way"
            )
        return self

    @property
    def on_ray(self) -> bool:
        """Whether Ray runs the target, not this process."""
        return self.workers > 1 or self.ray_address is not None

    @property
    def content(self) -> dict[str, Any]:
        """The values that decide what is in the store."""
        return self.model_dump(mode="json", exclude=set(self.how_it_runs))

    @model_validator(mode="after")
    def _shards_are_whole_chunks(self) -> Self:
        if self.shard_tokens % self.chunk_tokens:
            raise ValueError(
                f"extract.shard_tokens ({self.shard_tokens}) must be a multiple of "
                f"extract.chunk_tokens ({self.chunk_tokens}); change one of them"
            )
        return self
