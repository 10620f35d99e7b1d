"""Curves across draft vocabularies as CSV, for `dvc plots`."""

import csv
import io

from eagle3.artifacts import Decision


def acceptance_curves(decision: Decision) -> str:
    """Rows of size, k and acceptance length over all eval rows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["size", "k", "acceptance_length"])
    for figures in decision.sizes:
        for k, length in figures.acceptance_length.items():
            writer.writerow([figures.size, k, f"{length:.6f}"])
    return text.getvalue()
