"""Where captured states wait to be taken, and in which dtype."""

from pathlib import Path

from eagle3.artifacts import Split, TargetModel
from eagle3.config import ExtractParams, StateDtype
from eagle3.work import workspace


def captured_folder(target: TargetModel, engine: str, params: ExtractParams) -> Path:
    """Where states lie that this target gave in this engine while it answered; made if missing.

    States follow from target, engine and tokens alone: not from the chats or their sampling.
    """
    dtypes = {"state_dtype": params.state_dtype, "eval_state_dtype": params.eval_state_dtype}
    made_of = {"target": target.fingerprint, "engine": engine, "extract": dtypes}
    return workspace("captured", made_of)


def captured_dtype(split: Split, params: ExtractParams) -> StateDtype:
    """What states of a split wait in: the dtype that they will be stored in, if it is exact."""
    wanted = params.eval_state_dtype if split == "eval" else params.state_dtype
    return "bfloat16" if wanted == "float8" else wanted
