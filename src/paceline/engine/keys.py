"""Keys and groups of requests: read from `SamplingParams.extra_args`, or given by a rule.

Users may set, in `extra_args` (over HTTP: `vllm_xargs`):

* `paceline_key`: the dice key, an integer of 64 bits (a negative number stands for its two's complement);
* `paceline_group`: the rollout group whose responses share drafts; default: requests with equal prompts;
* `paceline_sample`: index of the response within its group, from which a missing key is derived;
* `paceline_generated`: how many tokens at the end of the prompt were generated earlier (a resumed response); they count
  for `min_tokens` and penalties, while `max_tokens` is vLLM's limit of new ones;
* `paceline_policy_version`: version of the weights; a request that names it takes part in the KV pool, if there is one;
* `paceline_keep_kv`: after what the pool keeps the response: 1, the default, after max_tokens; 2 after an abort too
  (stop strings and clients that go away are aborts); 0 never: it will not go on.

A request without a key gets its `seed`, or else a key derived from (run seed, prompt, sample), where a missing sample
counts the requests with the same prompt that the engine has seen before. Engines that differ in vLLM's own `seed` or in
their data-parallel index derive different keys (`engine_seed`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.dice import derive_key, key_from_seed
from paceline.errors import RequestError, UnsupportedError

MASK = (1 << 64) - 1
MAX_PROMPTS = 1 << 16
"""Prompts whose samples are counted; beyond this the longest unused is forgotten."""

POOL_OPTIONS = ("paceline_policy_version", "paceline_keep_kv")
PREFIX, RESPONSE = "paceline_", "paceline_response"  # the latter is written by the scheduler
OPTIONS = ("paceline_key", "paceline_group", "paceline_sample", "paceline_generated", *POOL_OPTIONS)


def engine_seed(run_seed: int, vllm_config: Any) -> int:
    """The seed that one engine derives keys from.

    Engines that share a run must not give equal prompts equal keys: each counts their samples for itself. Trainers tell
    such engines apart by vLLM's seed (TRL: one per rank), vLLM tells its data-parallel ones apart by their index.
    """
    seed = vllm_config.model_config.seed or 0
    index = vllm_config.parallel_config.data_parallel_index
    return derive_key(run_seed, [index], seed & (MASK >> 1)) if seed or index else run_seed


def check_options(params: Any) -> None:
    """Refuse wrong `extra_args` where a request is made: raised in the engine's process, an error would end it.

    Raises RequestError, or UnsupportedError for what a resumed response cannot have.
    """
    extra = params.extra_args or {}
    unknown = [name for name in extra if name.startswith(PREFIX) and name not in (*OPTIONS, RESPONSE)]
    if unknown:
        raise RequestError(f"{unknown[0]} is no option of a request: these are {', '.join(OPTIONS)}")
    values = {name: _integer(extra, name) for name in OPTIONS}
    for name in ("paceline_sample", "paceline_generated", "paceline_policy_version"):
        if not 0 <= (values[name] or 0) <= MASK >> 1:
            raise RequestError(f"{name}={values[name]} must be at least 0 and fit in 63 bits")
    for name in ("paceline_key", "paceline_sample"):
        if params.n > 1 and values[name] is not None:
            raise RequestError(
                f"{name} with n={params.n}: it names one response, so all would be equal; "
                f"give one request per response, or a seed"
            )
    if params.seed is not None:
        key_from_seed(params.seed)
    if values["paceline_generated"]:
        check_resumed(params, f"paceline_generated={values['paceline_generated']}")


def check_resumed(params: Any, shown: str) -> None:
    """Refuse what vLLM would begin anew behind tokens that were generated earlier. shown: the request, for the message.

    Raises UnsupportedError.
    """
    given = {
        "structured_outputs": "the grammar would begin anew behind them",
        "stop": "a stop text that begins in them would be missed; use stop_token_ids",
        "repetition_detection": "it would look at the new tokens only",
    }
    for name, why in given.items():
        if getattr(params, name, None):
            raise UnsupportedError(f"{shown} with {name}: {why}, or generate the response whole")


def key_of(params: Any) -> int:
    """The dice key that `KeyBook.assign` gave a request. Never fails on a request that went through the scheduler."""
    extra = params.extra_args
    return int(extra["paceline_key"]) & MASK if extra else 0


def policy_version_of(params: Any) -> int | None:
    """The policy version that a request names; None if it does not take part in the KV pool."""
    version = (params.extra_args or {}).get("paceline_policy_version")
    return None if version is None else int(version)


def prompt_group(prompt: Sequence[int]) -> int:
    """Group id of a prompt: a 63-bit digest of its token ids."""
    digest = blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _integer(extra: dict[str, Any], name: str) -> int | None:
    value = extra.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer; set it in SamplingParams.extra_args")
    return value


def signed(key: int) -> int:
    """A key's 64 bits with a sign, as vLLM has seeds."""
    return key - (1 << 64) if key >> 63 else key


class KeyBook:
    """Gives each request of an engine its key and group; counts samples of equal prompts."""

    def __init__(self, run_seed: int, *, is_seed: bool = False) -> None:
        """is_seed: whether vLLM's model runner throws the dice, with the key for a seed (V2)."""
        self._run_seed, self._is_seed = run_seed, is_seed
        self._seen: OrderedDict[int, int] = OrderedDict()

    def assign(self, params: Any, tokens: Sequence[int], response: int) -> tuple[int, int, int]:
        """Write `paceline_key` and `paceline_response` into the request's extra_args, and what its seed is to be.

        What was generated earlier counts towards `min_tokens`, of which vLLM is left to see the rest.

        Returns:
            (key, group, number of prompt tokens that were generated earlier)
        """
        extra = dict(params.extra_args or {})
        carried = _integer(extra, "paceline_generated") or 0
        if not 0 <= carried < len(tokens):
            raise RequestError(
                f"paceline_generated={carried} must be at least 0 and less than the {len(tokens)} prompt tokens"
            )
        if not 0 <= (_integer(extra, "paceline_policy_version") or 0) <= MASK >> 1:
            raise RequestError(
                f"paceline_policy_version={extra['paceline_policy_version']} must be at least 0"
            )
        prompt = tokens[: len(tokens) - carried]
        group = _integer(extra, "paceline_group")
        if group is None:
            group = prompt_group(prompt)
        key = _integer(extra, "paceline_key")
        if key is None:
            key = self._derive(params, prompt, _integer(extra, "paceline_sample"))
        extra["paceline_key"] = key & MASK
        extra[RESPONSE] = response
        params.extra_args = extra
        params.seed = self.seed(key & MASK)
        params.min_tokens = max(params.min_tokens - carried, 0)
        return key & MASK, group & (MASK >> 1), carried

    def seed(self, key: int) -> int | None:
        """What vLLM gets for a request's seed: the key's 64 bits with a sign; on V1, where it would build a random
        generator that nothing reads, none."""
        return signed(key) if self._is_seed else None

    def _derive(self, params: Any, prompt: Sequence[int], sample: int | None) -> int:
        if params.seed is not None:
            return key_from_seed(params.seed)
        if sample is None:
            name = prompt_group(prompt)
            sample = self._seen.pop(name, 0)
            self._seen[name] = sample + 1
            if len(self._seen) > MAX_PROMPTS:
                self._seen.popitem(last=False)
        return derive_key(self._run_seed, prompt, sample)
