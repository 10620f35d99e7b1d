"""From conversations to rows of tokens with a loss mask."""
