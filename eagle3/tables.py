"""A decision as text: decision.md, and the one-screen table that ends a run."""

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table

from eagle3.artifacts import Decision
from eagle3.comparison import SizeFigures, Verdict
from eagle3.plots import size_label

Row = tuple[str, Callable[[SizeFigures], str]]


def summary_table(decision: Decision) -> Group:
    """The comparison on one screen: figures by size, then the winner at each k."""
    figures = Table(title="Draft vocabularies compared")
    figures.add_column("")
    for size in decision.sizes:
        figures.add_column(size_label(size.size), justify="right")
    for name, cell in _figure_rows(decision):
        figures.add_row(name, *(cell(size) for size in decision.sizes))
    headlines = [_headline(decision, k) for k in decision.draft_tokens]
    return Group(figures, *headlines, _best(decision))


def decision_markdown(decision: Decision, plots: Sequence[str]) -> str:
    """The whole comparison as a page; `plots` are file names in `plots/` beside it."""
    sections = [
        f"# Draft vocabularies compared: {', '.join(size_label(s.size) for s in decision.sizes)}",
        "## Which one is faster",
        "\n".join(f"* {_headline(decision, k)}" for k in decision.draft_tokens),
        _best(decision),
        "## Figures",
        _markdown_table("", decision, _figure_rows(decision)),
        "## Acceptance length by domain",
        _markdown_table("", decision, _domain_rows(decision)),
    ]
    if decision.verdicts:
        sections += ["## What would have to change for the other to win", _changes(decision)]
    sections += ["## Plots", *(f"![{name}](plots/{name})" for name in plots)]
    sections += ["## How to read this", _reading(decision)]
    return "\n\n".join(sections) + "\n"


def _figure_rows(decision: Decision) -> list[Row]:
    k = decision.headline_k
    return [
        ("draft vocabulary", lambda size: f"{size.draft_vocab:,}"),
        ("coverage, train", lambda size: f"{size.coverage_train:.2%}"),
        ("coverage, eval", lambda size: f"{size.coverage_eval:.2%}"),
        *(_by_k("acceptance length", k, _acceptance) for k in decision.draft_tokens),
        (f"drafts ended by a token outside, k = {k}", lambda s: f"{s.oov_miss_rate[k]:.2%}"),
        ("draft step: layer (µs)", lambda size: f"{size.draft_layer_us:,.0f}"),
        ("draft step: head (µs)", lambda size: f"{size.draft_head_us:,.0f}"),
        ("target step (µs)", lambda size: f"{size.target_step_us:,.0f}"),
        *(
            _by_k("projected speedup", k, lambda s, k: f"{s.speedup_projected[k]:.3f}")
            for k in decision.draft_tokens
        ),
    ]


def _domain_rows(decision: Decision) -> list[Row]:
    domains = sorted({name for size in decision.sizes for name in size.acceptance_length_by_domain})

    def row(domain: str) -> Callable[[SizeFigures, int], str]:
        return lambda size, k: f"{size.acceptance_length_by_domain[domain][k]:.3f}"

    return [_by_k(domain, k, row(domain)) for domain in domains for k in decision.draft_tokens]


def _by_k(name: str, k: int, cell: Callable[[SizeFigures, int], str]) -> Row:
    return f"{name}, k = {k}", lambda size: cell(size, k)


def _acceptance(size: SizeFigures, k: int) -> str:
    return f"{size.acceptance_length[k]:.3f} ± {2 * size.sampling_error[k]:.3f}"


def _markdown_table(corner: str, decision: Decision, rows: Sequence[Row]) -> str:
    names = [size_label(size.size) for size in decision.sizes]
    lines = [
        f"| {corner} | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
        *(
            f"| {name} | " + " | ".join(cell(size) for size in decision.sizes) + " |"
            for name, cell in rows
        ),
    ]
    return "\n".join(lines)


def _headline(decision: Decision, k: int) -> str:
    verdict = decision.closest(k)
    if verdict is None:
        only = decision.sizes[0]
        alone = f"{only.speedup_projected[k]:.3f} times plain decoding"
        return f"k = {k}: {size_label(only.size)} alone, {alone}."
    speedup = {size.size: size.speedup_projected[k] for size in decision.sizes}
    winner, other = size_label(verdict.winner), size_label(verdict.other)
    measured = (
        f"k = {k}: {winner} wins by {verdict.advantage:.1%} over {other} "
        f"({speedup[verdict.winner]:.3f} against {speedup[verdict.other]:.3f} times plain decoding)"
    )
    if verdict.within_noise:
        return f"{measured}, but measurement error alone can make {verdict.noise:.1%}: a tie here."
    return f"{measured}; measurement error is about {verdict.noise:.1%}."


def _best(decision: Decision) -> str:
    speedup, k, size = max(
        (
            (size.speedup_projected[k], k, size)
            for size in decision.sizes
            for k in decision.draft_tokens
        ),
        # Equal speeds: fewer drafted tokens, then the smaller vocabulary.
        key=lambda entry: (entry[0], -entry[1], -entry[2].draft_vocab),
    )
    best = f"Best of all: {size_label(size.size)} at k = {k}, {speedup:.3f} times plain decoding"
    if speedup <= 1:
        return f"{best}: with these drafters, plain decoding is faster on this machine."
    return f"{best}."


def _changes(decision: Decision) -> str:
    figures = {size.size: size for size in decision.sizes}
    blocks = []
    for verdict in decision.verdicts:
        winner, other = size_label(verdict.winner), size_label(verdict.other)
        lines = [
            f"k = {verdict.k}, {winner} over {other}. Each change alone makes {other} the winner:",
            *_boundaries(verdict, figures[verdict.other], decision),
        ]
        blocks.append("\n".join([lines[0], "", *(f"* {line}" for line in lines[1:])]))
    return "\n\n".join(blocks)


def _boundaries(verdict: Verdict, other: SizeFigures, decision: Decision) -> list[str]:
    k = verdict.k
    name, other_name = size_label(verdict.winner), size_label(verdict.other)
    ratio = (
        f"acceptance ratio {name} / {other_name} below {verdict.break_even_ratio:.4f} "
        f"(measured {verdict.acceptance_ratio:.4f})"
    )
    if verdict.other_needs_acceptance is None:
        ratio += f"; with {name} as it is, no acceptance up to k + 1 is enough"
    else:
        ratio += (
            f": with {name} as it is, acceptance length of {other_name} above "
            f"{verdict.other_needs_acceptance:.3f} (measured {other.acceptance_length[k]:.3f})"
        )
    if verdict.other_needs_head_us is None:
        head = f"head of {other_name}: not even a free one is enough"
    else:
        own_us = other.head * decision.shared.target_step_us
        head = (
            f"head of {other_name} below {verdict.other_needs_head_us:,.0f} µs ({own_us:,.0f} now)"
        )
    return [ratio, head, _both_heads(verdict), _target_step(verdict, decision)]


def _both_heads(verdict: Verdict) -> str:
    factor = verdict.head_scale_boundary
    if factor is None:
        return "both heads cheaper or dearer alike (sharded, quantised): no factor is enough"
    way = "below" if factor < 1 else "above"
    return (
        f"both heads' cost (sharded, quantised, a larger model) times a factor {way} {factor:.3g}"
    )


def _target_step(verdict: Verdict, decision: Decision) -> str:
    boundary, now = verdict.target_step_boundary_us, decision.shared.target_step_us
    if boundary is None:
        return "a faster or slower target, drafting as it is: no target step is enough"
    way = "below" if boundary < now else "above"
    return f"target step {way} {boundary:,.0f} µs ({now:,.0f} now), verifying scaled with it"


def _reading(decision: Decision) -> str:
    shared = decision.shared
    verify = ", ".join(f"{shared.verify[k]:.3f} at k = {k}" for k in decision.draft_tokens)
    return (
        "Acceptance length is tokens per target step, the target's own included, greedy, by replay "
        "on the eval split; tokens outside the draft vocabulary count as misses; ± is two standard "
        "errors. Projected speedup is tau / (v + k c). Plain target step, verifying and the "
        "drafter's layer are the same work for every size, so they are one number each: the mean "
        "of the sizes' measurements, in target steps of the same run. "
        f"Here layer = {shared.layer:.3f}, v = {verify}; their largest spread between sizes, "
        f"{shared.spread:.1%}, is taken for the timing error of the heads. The speedups in "
        "reports/metrics use each size's own times and can differ by that spread."
    )
