"""`paceline rollout`: responses for a file of prompts, on one engine or on a fleet."""
