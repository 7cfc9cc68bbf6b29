"""The target as drafters' training knows it: its embedding and head, and its hidden states by a forward pass.

The states come from transformers, as in a trainer's process; an engine can hand over its own (Sample).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.distillation.networks import PROBE_ERROR, PROBE_TOKENS, Shared, logit_scale
from paceline.distillation.packing import ATTENTION_NAME, Sample, divide
from paceline.errors import CheckpointError


def load_model(folder: Path) -> Any:
    """A causal language model of transformers in float32. Raises CheckpointError for one that is not there, or lacks
    weights. Before it is given packs, `check_packs`.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {folder}: {' '.join(str(error).split())[:200]}") from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights of its model, first {missing[0]!r}: save it again with "
            "save_pretrained"
        )
    return model


def share(model: Any) -> Shared:
    """What heads use of a target. The tensors are the model's own. Raises CheckpointError for a target whose logits are
    not those of its head, or a multiple.
    """
    return Shared(
        embedding=model.get_input_embeddings().weight.detach(),
        head=model.get_output_embeddings().weight.detach(),
        config=model.config.get_text_config(),
        scale=logit_scale(model),
    )


def check_packs(model: Any) -> None:
    """Raise CheckpointError for a model in which a document of a pack is not alone, as convolutions and state spaces
    mix it with the one before; TrainingError for attention that cannot be packed (`attend_documents`).
    """
    num_ids = model.get_input_embeddings().weight.shape[0]
    first, second = ((torch.arange(PROBE_TOKENS) + n) % num_ids for n in (0, PROBE_TOKENS))
    behind, alone = read_states(model, [first, second], ())[1], read_states(model, [second], ())[0]
    if not float((behind - alone).abs().max()) <= PROBE_ERROR * float(alone.abs().max()):
        raise CheckpointError(
            f"{type(model).__name__} mixes responses that are computed side by side: use a model with full softmax "
            "attention in all layers, such as Llama, Qwen2 or Qwen3"
        )


def choose_layers(num_layers: int) -> tuple[int, int, int]:
    """The three states that EAGLE-3 fuses, by the layers that they enter: low, middle, high.

    vLLM's default for 8 layers and more. Raises CheckpointError for fewer layers than there are states to choose from.
    """
    if num_layers < 4:
        raise CheckpointError(
            f"EAGLE-3 fuses three inner states, and the target has {num_layers} layers: train an EAGLE head"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 8 else (1, 2, 3)


def read_states(model: Any, ids: Sequence[Tensor], layers: Sequence[int]) -> list[Tensor]:
    """Hidden states of documents, in one pass, for `Sample.states`. Each [num_tokens, (len(layers) + 1) * hidden]

    ids: each [num_tokens] int64. layers: those whose inputs are kept, besides the last one's normed output.
    """
    lengths = tuple(map(len, ids))
    with torch.no_grad():
        output = model.base_model(
            input_ids=torch.cat(list(ids))[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            output_hidden_states=bool(layers),
            document_lengths=lengths,
        )
    kept = [output.hidden_states[layer][0] for layer in layers]
    return list(torch.cat([*kept, output.last_hidden_state[0]], -1).split(lengths))


def read_samples(
    model: Any, responses: Iterable[tuple[Tensor, int]], layers: Sequence[int], max_tokens: int
) -> Iterator[Sample]:
    """(ids, number of prompt tokens) as samples, `max_tokens` tokens in a forward pass at most, in order."""
    for part in divide(responses, max_tokens, lambda response: len(response[0])):
        states = read_states(model, [ids.long() for ids, _ in part], layers)
        for (ids, num_prompt_tokens), state in zip(part, states, strict=True):
            yield Sample(ids, num_prompt_tokens, state.clone())
