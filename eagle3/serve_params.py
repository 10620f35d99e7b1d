"""The `serve` section of params.yaml: how a drafter is measured inside a serving engine."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from eagle3.config import Dtype, NonNegative, Positive, Section


class ServeParams(Section):
    """The drafter inside vLLM: one server per k, and one without a drafter to compare with."""

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
