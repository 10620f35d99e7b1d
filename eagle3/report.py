"""The comparison of draft vocabularies: from evaluations to a decision, for people and programs.

`compare` writes decision.md, plots/*.png and, last, the record decision.json into one folder.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from eagle3.acceptance import projected_speedup
from eagle3.artifacts import Decision, DraftVocab, Evaluation, write_atomically
from eagle3.comparison import SharedCosts, SizeFigures
from eagle3.decision import acceptance_error, relative_spread, verdicts_at
from eagle3.errors import ArtifactError
from eagle3.plots import draw_all
from eagle3.tables import decision_markdown

COVERAGE_CURVES = Path("reports/coverage")
"""Where the vocab stage leaves coverage against size, one CSV file a size."""


def compare(
    evaluations: Sequence[Evaluation], vocabs: Sequence[DraftVocab], out: Path = Decision.home
) -> Decision:
    """Decide, and write decision.md, plots/ and the record; arguments and errors of `decide`."""
    decision = decide(evaluations, vocabs)
    curves = [COVERAGE_CURVES / f"{vocab.size}.csv" for vocab in vocabs]
    plots = draw_all(decision, curves, out / "plots")
    write_atomically(out / "decision.md", decision_markdown(decision, [p.name for p in plots]))
    decision.save(out)
    return decision


def decide(evaluations: Sequence[Evaluation], vocabs: Sequence[DraftVocab]) -> Decision:
    """Put the drafters of several draft vocabularies side by side and name the fastest at each k.

    `vocabs` are the vocabularies of the evaluations, in the same order. Figures by domain come
    from `evaluation.json` in each evaluation's home.

    Raises:
        ArtifactError: the evaluations are of different corpora, targets or k.
    """
    assert [v.size for v in vocabs] == [e.size for e in evaluations], "a vocabulary per evaluation"
    draft_tokens = _common_draft_tokens(evaluations)
    shared = _shared_costs(evaluations, draft_tokens)
    sizes = tuple(
        _size_figures(evaluation, vocab, shared, draft_tokens)
        for evaluation, vocab in zip(evaluations, vocabs, strict=True)
    )
    return Decision(
        made_from={f"{e.stage}@{e.size}": e.fingerprint for e in evaluations}
        | {f"{v.stage}@{v.size}": v.fingerprint for v in vocabs},
        draft_tokens=draft_tokens,
        sizes=sizes,
        shared=shared,
        verdicts=tuple(v for k in draft_tokens for v in verdicts_at(k, sizes, shared)),
    )


def _common_draft_tokens(evaluations: Sequence[Evaluation]) -> tuple[int, ...]:
    """The k of every evaluation, ascending, once it is sure that they measured the same thing."""
    first = evaluations[0]
    for evaluation in evaluations[1:]:
        for source in ("target", "corpus", "extract"):
            one, other = first.made_from.get(source), evaluation.made_from.get(source)
            if one != other:
                raise ArtifactError(
                    f"{Evaluation.home(evaluation.size)} was made from another {source} than "
                    f"{Evaluation.home(first.size)}; run `dvc repro evaluate`"
                )
        if _draft_tokens(evaluation) != _draft_tokens(first):
            raise ArtifactError(
                f"{Evaluation.home(evaluation.size)} has k = {_draft_tokens(evaluation)}, "
                f"{Evaluation.home(first.size)} has {_draft_tokens(first)}; "
                "run `dvc repro evaluate`"
            )
    return _draft_tokens(first)


def _draft_tokens(evaluation: Evaluation) -> tuple[int, ...]:
    found = (re.fullmatch(r"acceptance_length_k(\d+)", name) for name in evaluation.metrics)
    return tuple(sorted(int(match[1]) for match in found if match))


def _shared_costs(evaluations: Sequence[Evaluation], draft_tokens: Sequence[int]) -> SharedCosts:
    layers = [_in_target_steps(e, "draft_layer_us") for e in evaluations]
    verify = {
        k: [_in_target_steps(e, f"verify_step_us_k{k}") for e in evaluations] for k in draft_tokens
    }
    return SharedCosts(
        target_step_us=_mean([e.metrics["target_step_us"] for e in evaluations]),
        layer=_mean(layers),
        verify={k: _mean(values) for k, values in verify.items()},
        spread=max(relative_spread(values) for values in (layers, *verify.values())),
    )


def _in_target_steps(evaluation: Evaluation, name: str) -> float:
    return evaluation.metrics[name] / evaluation.metrics["target_step_us"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _size_figures(
    evaluation: Evaluation, vocab: DraftVocab, shared: SharedCosts, draft_tokens: Sequence[int]
) -> SizeFigures:
    metrics = evaluation.metrics
    lengths = {k: metrics[f"acceptance_length_k{k}"] for k in draft_tokens}
    head = _in_target_steps(evaluation, "draft_head_us")
    rates = {
        k: [metrics[f"acceptance_rate_k{k}_pos{position}"] for position in range(k)]
        for k in draft_tokens
    }
    return SizeFigures(
        size=evaluation.size,
        draft_vocab=evaluation.draft_vocab,
        coverage_train=vocab.coverage["coverage_train"],
        coverage_eval=vocab.coverage["coverage_eval"],
        acceptance_length=lengths,
        sampling_error={
            k: acceptance_error(rates[k], int(metrics[f"drafts_k{k}"])) for k in draft_tokens
        },
        acceptance_length_by_domain=_by_domain(evaluation),
        oov_miss_rate={k: metrics[f"oov_miss_rate_k{k}"] for k in draft_tokens},
        draft_layer_us=metrics["draft_layer_us"],
        draft_head_us=metrics["draft_head_us"],
        target_step_us=metrics["target_step_us"],
        head=head,
        speedup_projected={
            k: projected_speedup(length, k, shared.layer + head, shared.verify[k])
            for k, length in lengths.items()
        },
    )


def _by_domain(evaluation: Evaluation) -> dict[str, dict[int, float]]:
    """Acceptance length by domain, then by k."""
    path = Evaluation.home(evaluation.size) / "evaluation.json"
    try:
        replay = json.loads(path.read_text())["replay"]
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error!r}); run `dvc repro evaluate@{evaluation.size}`"
        ) from error
    lengths: dict[str, dict[int, float]] = {}
    for k, domains in replay.items():
        for domain, figures in domains.items():
            if domain != Evaluation.overall:
                lengths.setdefault(domain, {})[int(k)] = figures["acceptance_length"]
    return lengths
