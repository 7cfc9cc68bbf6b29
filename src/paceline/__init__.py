"""Paceline: fast rollouts for LLM reinforcement learning, token for token the same as plain decoding."""

__version__ = "0.1.0"
