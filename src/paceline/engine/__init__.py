"""The vLLM plug-in. Here: what fits every model runner of vLLM's; private names are imported in compat.py.

kv/          an engine's KV blocks, and the connector to the KV pool
multipath/   several draft paths per request
v1/          the parts of model runner V1 that sample, draft and verify
"""
