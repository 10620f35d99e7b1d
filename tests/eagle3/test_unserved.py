from pathlib import Path

from eagle3.artifacts import Drafter, Serving
from eagle3.config import ServeParams
from eagle3.unserved import record_unserved

PARAMS = ServeParams(
    engine="none",
    draft_tokens=(3,),
    temperatures=(0.0,),
    batch_sizes=(1,),
    prompts=3,
    seed=0,
    dtype="float32",
)


def test_a_drafter_that_no_engine_served_has_a_record_that_says_so(tmp_path: Path):
    drafter = Drafter(
        made_from={},
        size=128,
        draft_vocab=128,
        best_step=1,
        acceptance_length_validation=1.5,
        refused_rows=0,
        trainable_parameters=10,
        sha256="s" * 64,
        params={},
    )

    record_unserved([], drafter, PARAMS, tmp_path)

    serving = Serving.load(tmp_path)
    assert (serving.size, serving.engine, serving.figures) == (128, "none", {})
    assert not serving.was_served
    assert serving.made_from == {"train": drafter.fingerprint}
