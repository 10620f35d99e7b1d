"""Sections of params.yaml from the network on: how a drafter is built, trained and measured.

As in eagle3/sections.py, no field has a default.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from eagle3.sections import (
    Device,
    Dtype,
    Fraction,
    HeadProducts,
    Loss,
    NonNegative,
    Positive,
    Section,
    Sharding,
)


class DrafterParams(Section):
    """The network: one decoder layer of the target's width, its own head."""

    intermediate_size: Positive = Field(description="Width of the MLP, I.")
    num_attention_heads: Positive = Field(description="Query heads.")
    num_key_value_heads: Positive = Field(description="Key and value heads.")
    head_dim: Positive = Field(description="Width of a head; even, for RoPE.")
    rms_norm_eps: float = Field(gt=0, description="Of every norm.")
    rope_theta: float = Field(gt=0, description="Base of the rotary embedding.")
    max_position_embeddings: Positive = Field(description="Longest context that engines may serve.")
    fc_norm: bool = Field(
        description="EAGLE-3.1: a norm of its own for each of the target's three states, before fc."
    )
    norm_output: bool = Field(
        description="EAGLE-3.1: feed the drafter's state back after its final norm, not before."
    )

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
    init_from: str | None = Field(
        description="Folder of a drafter in the plain format to go on from, its draft vocabulary "
        "kept; null starts a new one."
    )
    head_init: Literal["target", "random"] = Field(
        description="Start a new drafter's head from the target's rows, or at random."
    )
    head: Literal["trained", "frozen"] = Field(
        description="trained; or frozen, which keeps the target's own rows: no gradient, no "
        "optimizer state, but written into the checkpoint, since engines read them there."
    )
    head_products: HeadProducts = Field(
        description="dtype makes the draft head's products in train.dtype; float8 in 8 bits with "
        "scales, for GPUs that have cores for it: the step is faster with a large draft "
        "vocabulary, and its gradients are coarser."
    )
    loss: Loss = Field(
        description="cross_entropy, the EAGLE-3 paper's; or one that aims at the acceptance rate "
        "under sampling: tv, the total variation distance, or lk_alpha, -log of acceptance."
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
    processes: Positive = Field(
        description="Processes that share the micro-batches of a step, each on a GPU of its own or "
        "on its part of the CPU's cores."
    )
    reader_processes: NonNegative = Field(
        description="On a GPU, processes that read the states of the next step, beside each that "
        "trains; 0 reads by threads of the one that trains, as on a CPU."
    )
    sharding: Sharding = Field(
        description="none: every process holds all float32 weights, gradients and moments; full: "
        "each holds a part (FSDP2), for drafters too large for one GPU."
    )
    recompute: bool = Field(
        description="Compute each step again in its backward pass instead of keeping it: longer "
        "batches fit, and a step takes longer. On a GPU in bfloat16 attention is kept."
    )
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
    keep_checkpoints: NonNegative = Field(
        description="Drafters of the newest validations to keep in checkpoints/, beside the best."
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

    @model_validator(mode="after")
    def _a_frozen_head_is_the_targets(self) -> Self:
        if self.head == "frozen" and self.init_from is None and self.head_init != "target":
            raise ValueError(
                f"train.head is frozen, but train.head_init is {self.head_init}; set head_init to "
                "target: a head that is not trained is worth what it starts from"
            )
        return self

    @model_validator(mode="after")
    def _float8_products_are_made_on_the_hot_path(self) -> Self:
        if self.head_products == "float8" and (self.dtype != "bfloat16" or self.device == "cpu"):
            raise ValueError(
                f"train.head_products is float8, but train.dtype is {self.dtype} and train.device "
                f"{self.device}; set them to bfloat16 and cuda, or train.head_products to dtype"
            )
        return self

    @model_validator(mode="after")
    def _parts_have_several_holders(self) -> Self:
        if self.sharding == "full" and self.processes == 1:
            raise ValueError(
                "train.sharding is full, but train.processes is 1; raise it to the number of GPUs, "
                "or set train.sharding to none"
            )
        return self

    @model_validator(mode="after")
    def _every_process_has_an_equal_share(self) -> Self:
        if self.accumulate % self.processes:
            raise ValueError(
                f"train.accumulate ({self.accumulate}) must be a multiple of train.processes "
                f"({self.processes}): whole micro-batches are shared out; raise the first to "
                f"{-(-self.accumulate // self.processes) * self.processes} (and lower "
                "train.batch_tokens, if a step shall stay as large), or lower the second"
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


class ServeParams(Section):
    """The drafter inside vLLM: one server per k, and one without a drafter to compare with."""

    engine: Literal["none", "vllm"] = Field(
        description="none leaves the drafter unserved; vllm needs `make engine`."
    )
    draft_tokens: tuple[Positive, ...] = Field(min_length=1, description="The k of each server.")
    temperatures: tuple[Annotated[float, Field(ge=0, le=2)], ...] = Field(
        description="Of the answers; 0 is greedy and must be there: losslessness is defined on it."
    )
    batch_sizes: tuple[Positive, ...] = Field(
        description="Prompts in flight at a time; 1, the single stream, must be there."
    )
    prompts: Positive = Field(description="Eval rows per domain; every turn of a row is answered.")
    seed: NonNegative = Field(description="Of sampled answers.")
    dtype: Dtype = Field(
        description="Target and drafter in the engine. In float32 greedy text can be compared "
        "token by token; bfloat16 is how a GPU serves."
    )

    @model_validator(mode="after")
    def _there_is_a_greedy_single_stream(self) -> Self:
        if 0.0 not in self.temperatures:
            raise ValueError(
                f"serve.temperatures is {list(self.temperatures)}; add 0.0: greedy text "
                "must be equal with and without the drafter"
            )
        if 1 not in self.batch_sizes:
            raise ValueError(f"serve.batch_sizes is {list(self.batch_sizes)}; add 1")
        return self
