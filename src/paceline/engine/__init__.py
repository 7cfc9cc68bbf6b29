"""The vLLM plug-in: scheduler, sampler, worker, weight updates, batch invariance; private names live in compat.py."""
