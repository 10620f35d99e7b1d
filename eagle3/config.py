"""params.yaml as a whole: read, checked at once, every bad key named.

The sections themselves are in eagle3/sections.py, extract_section.py and model_sections.py.
"""

import re
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from eagle3.errors import ParamsError
from eagle3.extract_section import ExtractParams
from eagle3.model_sections import (
    DrafterParams,
    EvaluateParams,
    ServeParams,
    TrainParams,
)
from eagle3.sections import (
    AnswerParams,
    Backend,
    CorpusParams,
    Device,
    Dtype,
    Fraction,
    HeadProducts,
    HuggingFaceSource,
    JsonlSource,
    Loss,
    NonNegative,
    PackagedSource,
    Positive,
    Section,
    Sharding,
    Source,
    StateDtype,
    TargetParams,
    TargetShape,
    VocabParams,
    VocabSize,
)

# One place to import from: flows and tasks know this module alone.
__all__ = [
    "PARAMS_FILE",
    "AnswerParams",
    "Backend",
    "CorpusParams",
    "Device",
    "DrafterParams",
    "Dtype",
    "EvaluateParams",
    "ExtractParams",
    "Fraction",
    "HeadProducts",
    "HuggingFaceSource",
    "JsonlSource",
    "Loss",
    "NonNegative",
    "PackagedSource",
    "Params",
    "Positive",
    "Section",
    "ServeParams",
    "Sharding",
    "Source",
    "StateDtype",
    "TargetParams",
    "TargetShape",
    "TrainParams",
    "VocabParams",
    "VocabSize",
    "check_params",
    "draft_vocab_size",
    "load_params",
    "parse_size",
]

PARAMS_FILE = Path("params.yaml")

FLOAT8_ALIGNED = 16
"""What matrix products of float8 want sizes to be a multiple of (torch._scaled_mm)."""


class Params(Section):
    """All of params.yaml."""

    target: TargetParams
    corpus: CorpusParams
    extract: ExtractParams
    vocab: VocabParams
    drafter: DrafterParams
    train: TrainParams
    evaluate: EvaluateParams
    serve: ServeParams

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

    @model_validator(mode="after")
    def _float8_products_have_sizes_that_fit(self) -> Self:
        if self.train.head_products == "dtype":
            return self
        shape = self.target.shape
        sizes = [("vocab.sizes has", size) for size in self.vocab.sizes if size != "full"]
        sizes += [("target.shape.vocab_size is", shape.vocab_size)] * ("full" in self.vocab.sizes)
        for what, size in (*sizes, ("target.shape.hidden_size is", shape.hidden_size)):
            if size % FLOAT8_ALIGNED:
                raise ValueError(
                    f"train.head_products is float8, but {what} {size}, no multiple of "
                    f"{FLOAT8_ALIGNED}, as float8 products need it; change that size, or set "
                    "train.head_products to dtype"
                )
        return self

    @model_validator(mode="after")
    def _one_process_reads_what_is_deleted(self) -> Self:
        if not self.extract.keep and self.train.processes > 1:
            raise ValueError(
                f"extract.keep is false, but train.processes is {self.train.processes}: a shard is "
                "deleted by the process that has read it, and others may still need it; set "
                "train.processes to 1, or extract.keep to true"
            )
        return self

    @model_validator(mode="after")
    def _what_is_captured_is_what_would_be_extracted(self) -> Self:
        answers, states = self.corpus.answers.backend, self.extract.backend
        if self.extract.capture_answers and answers != states:
            raise ValueError(
                f"extract.capture_answers is true, but corpus.answers.backend is {answers} and "
                f"extract.backend {states}, whose states differ; set both to one of them, or "
                "extract.capture_answers to false"
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
    # A password in a URL must not go into the log.
    shown = re.sub(r"//[^/@\s]*@|\?[^'\s]*", "...", repr(fault["input"]))
    found = "" if isinstance(fault["input"], dict) else f" (found {shown})"
    return f"{key}: {message}{found}"
