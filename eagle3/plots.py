"""The comparison's plots as PNG files, one question each."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eagle3.artifacts import Decision
from eagle3.comparison import SizeFigures
from eagle3.config import VocabSize

WIDTH, HEIGHT, DPI = 7.0, 4.2, 120  # inches, inches, dots per inch


def draw_all(decision: Decision, coverage_curves: Sequence[Path], folder: Path) -> list[Path]:
    """Write every plot of a decision into the folder; returns the files, in reading order.

    `coverage_curves` are the CSV files of the vocab stage, one a size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _coverage(decision, coverage_curves, folder / "coverage.png"),
        _acceptance_by_k(decision, folder / "acceptance_by_k.png"),
        _acceptance_by_domain(decision, folder / "acceptance_by_domain.png"),
        _draft_step(decision, folder / "draft_step.png"),
        _speedup_by_k(decision, folder / "speedup_by_k.png"),
    ]


def size_label(size: VocabSize) -> str:
    """A draft vocabulary as people read it: `32,000` or `full`."""
    return size if size == "full" else f"{size:,}"


def _labels(sizes: Iterable[SizeFigures]) -> list[str]:
    return [size_label(size.size) for size in sizes]


def _canvas(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    # Without pyplot: no global state, and no display is ever looked for.
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    # No creation date and version in the file: an unchanged plot is an unchanged file for DVC.
    figure.savefig(path, metadata={"Software": None})
    return path


def _coverage(decision: Decision, curves: Sequence[Path], path: Path) -> Path:
    figure, axes = _canvas(
        "Answer tokens inside the draft vocabulary", "draft vocabulary (tokens)", "coverage"
    )
    colours = {"train": "C0", "eval": "C1"}
    for split, colour in colours.items():
        points = sorted({point for curve in curves for point in _curve(curve, split)})
        axes.plot(*zip(*points, strict=True), color=colour, label=f"{split} split")
    for size in decision.sizes:
        for colour, coverage in (("C0", size.coverage_train), ("C1", size.coverage_eval)):
            axes.plot(size.draft_vocab, coverage, "o", color=colour)
        axes.axvline(size.draft_vocab, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            size_label(size.size), (size.draft_vocab, 0.02), rotation=90, ha="right", va="bottom"
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.legend(loc="lower left")
    return _save(figure, path)


def _curve(path: Path, split: str) -> list[tuple[float, float]]:
    with path.open(newline="") as file:
        return [
            (float(row["size"]), float(row[f"coverage_{split}"])) for row in csv.DictReader(file)
        ]


def _acceptance_by_k(decision: Decision, path: Path) -> Path:
    figure, axes = _canvas(
        "Acceptance length (bars: two standard errors)",
        "drafted tokens k",
        "tokens per target step",
    )
    ks = list(decision.draft_tokens)
    for size in decision.sizes:
        lengths = [size.acceptance_length[k] for k in ks]
        errors = [2 * size.sampling_error[k] for k in ks]
        axes.errorbar(ks, lengths, errors, marker="o", capsize=3, label=size_label(size.size))
    axes.set_xticks(ks)
    axes.legend(title="draft vocabulary")
    return _save(figure, path)


def _acceptance_by_domain(decision: Decision, path: Path) -> Path:
    k = decision.headline_k
    figure, axes = _canvas(f"Acceptance length by domain, k = {k}", "", "tokens per target step")
    domains = sorted({name for size in decision.sizes for name in size.acceptance_length_by_domain})
    width = 0.8 / len(decision.sizes)
    for index, size in enumerate(decision.sizes):
        at = [place + index * width for place in range(len(domains))]
        heights = [size.acceptance_length_by_domain[domain][k] for domain in domains]
        bars = axes.bar(at, heights, width, label=size_label(size.size))
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(domains))], domains)
    # Room above the bars, for the legend.
    axes.margins(y=0.35)
    axes.legend(title="draft vocabulary", loc="upper right", ncols=len(decision.sizes))
    return _save(figure, path)


def _draft_step(decision: Decision, path: Path) -> Path:
    figure, axes = _canvas("One draft step", "draft vocabulary", "microseconds")
    labels = _labels(decision.sizes)
    layers = [size.draft_layer_us for size in decision.sizes]
    heads = [size.draft_head_us for size in decision.sizes]
    lower = axes.bar(labels, layers, 0.5, label="layer")
    upper = axes.bar(labels, heads, 0.5, bottom=layers, label="head")
    for bars in (lower, upper):
        axes.bar_label(bars, fmt="%.0f", label_type="center", fontsize=8)
    axes.legend()
    return _save(figure, path)


def _speedup_by_k(decision: Decision, path: Path) -> Path:
    figure, axes = _canvas(
        "Projected speedup, tau / (v + k c)", "drafted tokens k", "relative to plain decoding"
    )
    ks = list(decision.draft_tokens)
    for size in decision.sizes:
        speedups = [size.speedup_projected[k] for k in ks]
        axes.plot(ks, speedups, marker="o", label=size_label(size.size))
    axes.axhline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_xticks(ks)
    axes.legend(title="draft vocabulary")
    return _save(figure, path)
