"""What a model folder says about itself, read from its small files, so that bad input is refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paceline.drafting.drafter import fits_vocabulary, is_draft_head
from paceline.engine.rollout_engine import check_checkpoint
from paceline.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
UNSCALED = {"default", "llama3", "longrope", "su", "mrope"}
"""Kinds of RoPE scaling whose max_position_embeddings is the scaled length already."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder that has a configuration and weights."""

    folder: Path
    config: dict[str, Any]
    """Fields of the language model: `text_config` where there is one."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model knows; None when the configuration does not say."""
        return _integer(self.config.get("vocab_size"))

    @property
    def max_len(self) -> int | None:
        """Longest sequence, tokens; None when the configuration does not say."""
        lengths = [value for name in LENGTH_FIELDS if (value := _integer(self.config.get(name)))]
        if not lengths:
            return None
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            return lengths[0]
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        factor = scaling.get("factor")
        if kind in UNSCALED or not isinstance(factor, int | float):
            return lengths[0]
        length = scaling.get("original_max_position_embeddings", lengths[0]) if kind == "yarn" else lengths[0]
        return int(length * factor)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Key-value cache of one token, bytes; None for attention that is not plain (vLLM then decides alone)."""
        config = self.config
        if config.get("kv_lora_rank") or config.get("sliding_window"):
            return None
        layers, heads = _integer(config.get("num_hidden_layers")), _integer(config.get("num_attention_heads"))
        hidden = _integer(config.get("hidden_size"))
        if not (layers and heads and hidden):
            return None
        kv_heads = _integer(config.get("num_key_value_heads")) or heads
        head = _integer(config.get("head_dim")) or hidden // heads
        return 2 * layers * kv_heads * head * DTYPE_BYTES.get(dtype, 2)

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights in this number format; "auto" is what vLLM makes of it: never more than 16 bits."""
        stored = DTYPE_BYTES.get(str(self.config.get("dtype") or self.config.get("torch_dtype")), 2)
        size = sum(path.stat().st_size for path in self._weight_files())
        return size * DTYPE_BYTES.get(dtype, 2) // stored

    def fingerprint(self) -> str:
        """16 hex digits that change when the weights do: sizes, heads and tails of the weight files."""
        digest = blake2b((self.folder / "config.json").read_bytes(), digest_size=8)
        for path in self._weight_files():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()

    def _weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.bin"))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder's configuration. Raises CheckpointError when the folder cannot be a model."""
    check_checkpoint(folder)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the model again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: download or save the model again")
    text = config.get("text_config")
    return Checkpoint(folder, {**config, **text} if isinstance(text, dict) else config)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The folder's tokenizer (transformers). Raises CheckpointError when there is none or it cannot be loaded."""
    if not checkpoint.has_tokenizer:
        raise CheckpointError(
            f"model folder {checkpoint.folder} has no tokenizer ({TOKENIZER_FILES[0]} or the like): "
            'add its files, or give prompts as {"prompt_ids": [...]}'
        )
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder)
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.folder} cannot be loaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def check_drafter(drafter: Checkpoint, target: Checkpoint) -> None:
    """Raise CheckpointError unless the drafter speaks the target's tokens; padding rows aside.

    A draft head has no tokenizer of its own, and its sizes are the target's.
    """
    sizes = [(one.config.get("hidden_size"), one.vocab_size) for one in (drafter, target)]
    if is_draft_head(drafter.folder) and sizes[0] != sizes[1]:
        raise CheckpointError(
            f"the draft head {drafter.folder} is for a target of hidden size {sizes[0][0]} with {sizes[0][1]} tokens, "
            f"{target.folder} has {sizes[1][0]} and {sizes[1][1]}: train a head on this target"
        )
    if not fits_vocabulary(drafter.vocab_size or 0, target.vocab_size or 0):
        raise CheckpointError(
            f"the drafter {drafter.folder} has {drafter.vocab_size} tokens, the target {target.folder} has "
            f"{target.vocab_size}: use a drafter with the target's tokenizer"
        )
    if not (drafter.has_tokenizer and target.has_tokenizer):
        return
    theirs, ours = load_tokenizer(drafter).get_vocab(), load_tokenizer(target).get_vocab()
    different = {token for token, number in theirs.items() if ours.get(token) != number}
    different |= ours.keys() - theirs.keys()
    if different:
        raise CheckpointError(
            f"the drafter {drafter.folder} and the target {target.folder} have different tokenizers: "
            f"{len(different)} tokens differ, {min(different)!r} among them; use a drafter with the target's tokenizer"
        )
