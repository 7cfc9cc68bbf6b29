"""An engine's KV blocks: the connector to the KV pool, and what keeps NaN out of them."""
