"""The vLLM plug-in: scheduler, sampler, worker, weight updates, batch invariance; every private name is in compat.py."""
