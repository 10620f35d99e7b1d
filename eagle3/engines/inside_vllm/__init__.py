"""What runs inside the engine's own environment: may import vLLM and torch, not eagle3."""
