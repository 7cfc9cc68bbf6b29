"""Drafters that learn from the target (TLT 4): networks, losses, data, checkpoints, export. Knows no Ray, no vLLM."""
