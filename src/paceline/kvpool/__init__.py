"""The KV pool's store: keys and values of responses between two rollout chunks, shared by the workers of one machine.

Knows no vLLM: engine/kv/connector.py puts blocks in and takes them out; whoever ends a response calls `KvPool.drop`.
"""

from paceline.kvpool.entry import Address, Held, response_identity
from paceline.kvpool.pool import KvPool

__all__ = ["Address", "Held", "KvPool", "response_identity"]
