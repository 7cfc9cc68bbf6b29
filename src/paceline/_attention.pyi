IS_SUPPORTED: bool
PANEL_TOKENS: int
PANEL_SIZE: int

def store_tokens(
    key: int,
    key_step: int,
    value: int,
    value_step: int,
    slots: int,
    tokens: int,
    cache: int,
    block_step: int,
    kv_heads: int,
    head_size: int,
    block_tokens: int,
    threads: int,
) -> None: ...
def attend(
    x: int,
    y: int,
    cache: int,
    block_step: int,
    starts: int,
    contexts: int,
    tables: int,
    table_step: int,
    requests: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_tokens: int,
    scale: float,
    threads: int,
) -> None: ...
