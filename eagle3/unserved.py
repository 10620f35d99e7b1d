"""The record of a drafter that no engine served: what `serve.engine: none` makes, in no time."""

from collections.abc import Sequence
from pathlib import Path

from eagle3.artifacts import Artifact, Drafter, Serving
from eagle3.config import ServeParams


def record_unserved(
    sources: Sequence[Artifact], drafter: Drafter, params: ServeParams, out: Path
) -> Serving:
    """Write into `out` that the drafter was not served; `sources` are what serving would read."""
    serving = Serving(
        made_from={source.stage: source.fingerprint for source in (*sources, drafter)},
        size=drafter.size,
        draft_vocab=drafter.draft_vocab,
        engine=Serving.nowhere,
        dtype=params.dtype,
        draft_sampling="none",
        metrics={},
    )
    serving.save(out)
    return serving
