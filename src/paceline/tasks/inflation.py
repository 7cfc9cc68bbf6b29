"""Make a checkpoint larger without changing its function, so that a small trained policy costs what a
large one costs.

Width is padded with zeros (norm weights rescaled, since a root mean square over more entries is smaller),
heads are added whose output nobody reads, and layers are added that add nothing to the residual stream.
Used by benchmarks:

    python -m paceline.tasks.inflation SOURCE TARGET --hidden 1024 --intermediate 2816 --layers 16 \
        --heads 16 --kv-heads 8
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from paceline.drafting.drafter import is_draft_head
from paceline.errors import CheckpointError, ConfigError, PacelineError

MODEL_TYPES = ("qwen2", "llama")
"""Their norms all act on the residual stream; one epsilon can be rescaled for all of them."""


def inflate_checkpoint(
    source: Path | str,
    target: Path | str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
) -> int:
    """Write the larger checkpoint to `target` in the source's dtype and return its number of parameters.

    The new sizes may not be below the source's; the width of a head and the query heads per key-value
    head must stay. Exact but for rounding; in bfloat16 the weights stay exact if hidden / source hidden
    is a power of 4. CheckpointError: the source is missing or not of MODEL_TYPES. ConfigError: sizes that
    do not fit.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small = _load(source, None)
    old = small.config
    _check_sizes(old, hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads)
    shrink = old.hidden_size / hidden
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": old.rms_norm_eps * shrink,
    }
    config = type(old)(**{**_portable_settings(old), **sizes})
    with torch.device("meta"):  # weights that are drawn at random would take most of the time
        large = AutoModelForCausalLM.from_config(config)
    state = {
        name: torch.zeros(tensor.shape, dtype=small.dtype) for name, tensor in large.state_dict().items()
    }
    for name, tensor in small.state_dict().items():
        corner = tuple(slice(0, size) for size in tensor.shape)
        state[name][corner] = tensor * math.sqrt(shrink) if "norm" in name else tensor
    large.load_state_dict(state, assign=True)
    large.tie_weights()
    large.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return sum(parameter.numel() for parameter in large.parameters())


def inflate_head(head: Path | str, policy: Path | str, target: Path | str) -> None:
    """Write the draft head of a small policy so that it fits `policy`, the small one's inflated form, and drafts the
    same: what of the larger states is not zero is the smaller ones'.

    head: as `paceline drafter export` writes it. CheckpointError: it is missing, or not of this policy.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    head, target = Path(head), Path(target)
    if not is_draft_head(head):
        raise CheckpointError(f"{head} is no draft head: give a folder of 'paceline drafter export'")
    config = json.loads((head / "config.json").read_text())
    large = AutoConfig.from_pretrained(policy)
    small_size, size, width = config["hidden_size"], large.hidden_size, _head_width(large)
    if size < small_size or large.vocab_size != config["vocab_size"]:
        raise CheckpointError(
            f"{head} reads states of {small_size} and draws from {config['vocab_size']} ids, {policy} has {size} and "
            f"{large.vocab_size}: give the head of the policy that was inflated"
        )
    inner, queries, keys = large.intermediate_size, large.num_attention_heads, large.num_key_value_heads
    shapes = {
        "fc": (size, size),
        "q_proj": (queries * width, size),
        "k_proj": (keys * width, size),
        "v_proj": (keys * width, size),
        "o_proj": (size, queries * width),
        "gate_proj": (inner, size),
        "up_proj": (inner, size),
        "down_proj": (size, inner),
    }
    state = {}
    for name, tensor in load_file(head / "model.safetensors").items():
        kind = name.split(".")[-2]
        if kind in shapes:
            reads_states = kind not in (
                "o_proj",
                "down_proj",
            )  # an embedding and states may stand side by side
            parts = tensor.split(small_size, 1) if reads_states else (tensor,)
            state[name] = torch.cat([_widen(part, *shapes[kind]) for part in parts], 1)
        else:  # a norm
            state[name] = tensor.new_zeros(size)
            state[name][:small_size] = tensor * math.sqrt(small_size / size)
    config |= {
        "hidden_size": size,
        "intermediate_size": inner,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": width,
        "rms_norm_eps": config["rms_norm_eps"] * small_size / size,
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _widen(matrix: Any, rows: int, columns: int) -> Any:
    """The matrix in the corner of a larger one of zeros."""
    made = matrix.new_zeros(rows, columns)
    made[: matrix.shape[0], : matrix.shape[1]] = matrix
    return made


def measure_difference(source: Path | str, target: Path | str, tokens: list[int]) -> float:
    """Largest |difference| of the two checkpoints' logits in float32 over one sequence of token ids."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        a, b = (_load(folder, torch.float32)(input_ids=ids).logits for folder in (source, target))
    return float((a - b).abs().max())


def _load(folder: Path | str, dtype: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: give the folder of a Hugging Face checkpoint")
    model_type = AutoConfig.from_pretrained(folder).model_type
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{folder} is a {model_type!r} model: inflation works for {', '.join(MODEL_TYPES)}"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval()


def _portable_settings(config: Any) -> dict[str, Any]:
    """The source's settings without those that describe its layers one by one."""
    settings: dict[str, Any] = config.to_dict()
    return {key: value for key, value in settings.items() if key not in ("layer_types", "max_window_layers")}


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _check_sizes(config: Any, **new: int) -> None:
    old = {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
    }
    for name, size in new.items():
        if size < old[name]:
            raise ConfigError(
                f"inflation: {name} = {size} is below the source's {old[name]}: give at least that"
            )
    width = _head_width(config)
    if new["heads"] * width != new["hidden"]:
        raise ConfigError(
            f"inflation: hidden = {new['hidden']} is not heads = {new['heads']} x {width} (the width of the "
            f"source's heads): give hidden {new['heads'] * width} or heads {new['hidden'] // width}"
        )
    if new["heads"] * old["kv_heads"] != old["heads"] * new["kv_heads"]:
        raise ConfigError(
            f"inflation: {new['heads']} heads over {new['kv_heads']} kv_heads do not keep the source's "
            f"{old['heads']} over {old['kv_heads']}: scale both alike"
        )


def main(words: list[str] | None = None) -> int:
    """Inflate, compare the logits and print both; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.tasks.inflation", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    for name, size in (
        ("hidden", 1024),
        ("intermediate", 2816),
        ("layers", 16),
        ("heads", 16),
        ("kv-heads", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    sizes = vars(parser.parse_args(words))
    source, target = sizes.pop("source"), sizes.pop("target")
    try:
        parameters = inflate_checkpoint(source, target, **sizes)
        difference = measure_difference(source, target, [1, 5, 6, 7, 8, 9])
    except PacelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{target}: {parameters / 1e6:.1f}M parameters, largest difference in logits {difference:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
