"""From conversations to rows of tokens with a loss mask."""

from eagle3.corpus.build import build_corpus

__all__ = ["build_corpus"]
