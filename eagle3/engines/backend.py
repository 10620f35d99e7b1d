"""Who runs the target for a stage: the engine that params.yaml names, open while it is needed."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from eagle3.artifacts import TargetModel
from eagle3.config import Backend, TargetParams
from eagle3.engines.base import TargetEngine
from eagle3.engines.transformers import TransformersEngine
from eagle3.engines.vllm import VllmEngine


def open_engine(
    backend: Backend, target: TargetModel, params: TargetParams, longest: int, log_file: Path
) -> AbstractContextManager[TargetEngine]:
    """The engine for a `with`; one that is a server stops at its end.

    `longest` are the tokens of the longest prompt and its answer together, which a server must
    know when it starts; it writes its log to `log_file`.
    """
    if backend == "vllm":
        return VllmEngine(target, params, longest, log_file)
    return nullcontext(TransformersEngine(target, params))
