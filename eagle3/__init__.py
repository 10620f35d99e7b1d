"""Train EAGLE-3 drafters and measure what they are worth."""
