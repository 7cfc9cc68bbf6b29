"""The drafters that can be trained, in one shape: chains of drafts from every token of a pack at once.

`Eagle` and `Eagle3` are heads: one decoder layer on the target's hidden states, with the target's embedding and head,
both frozen (TLT 4.1). `SmallModel` is a language model of its own that sees tokens alone. Weights are named as in the
checkpoints that vLLM loads (export.py), so that a network's trainable state is its checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from paceline.distillation.chain_attention import ChainAttention, KeysValues
from paceline.distillation.packing import ATTENTION_NAME, Pack
from paceline.errors import CheckpointError

NEEDED = ("intermediate_size", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
"""Of a target's configuration, besides what every model has."""
LENGTH_BOUND = {"dynamic", "longrope"}
"""Kinds of rotary positions whose angles depend on the longest position that is computed with them."""
PROBE_TOKENS = 8
"""Of a model that is tried out."""
PROBE_ERROR = 1e-3
"""Of what it makes, by which two ways to compute that may differ."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What heads take from the target, never trained."""

    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden]
    config: Any
    """transformers' configuration of the target's language model."""
    scale: float = 1.0
    """Of its logits, `logit_scale`."""

    @property
    def vocab_size(self) -> int:
        """Ids, rows of padding among them."""
        return int(self.head.shape[0])

    def logits(self, states: Tensor) -> Tensor:
        """What the target decides in its last states. [num_tokens, hidden] -> [num_tokens, vocab]"""
        return F.linear(self.scale * states, self.head)


class Network(nn.Module):  # type: ignore[misc]
    """A drafter in training. Its parameters are what is trained, and nothing else."""

    lead: ClassVar[int]
    """Row i of step k stands for what the target decides in the state of token i + lead + k of the same document."""
    config: Any
    """transformers' configuration of the network, as its checkpoint has it."""
    num_fused: ClassVar[int] = 0
    """Inner states of the target per token that it reads; `Pack.states` must begin with them."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids, rows of padding among them."""

    @abstractmethod
    def unroll(self, pack: Pack, num_steps: int) -> Iterator[Tensor]:
        """What the head is applied to, step by step. [num_tokens, hidden]

        Drafts before the step's are taken to be right: the tokens that it feeds itself are the document's. Rows whose
        token i + lead + k lies behind the document's end mean nothing.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Of rows that `unroll` gave. [num_rows, vocab]"""


class DraftHead(Network):
    """What both heads share."""

    lead = 1

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.config = head_config(shared.config)
        if shared.scale != 1.0:
            self.config.logit_scale = shared.scale  # by which vLLM's heads multiply too
        self.shared = shared
        self.rotary = LlamaRotaryEmbedding(self.config)
        size = self.config.hidden_size
        self.fc = nn.Linear(self.fc_inputs * size, size, bias=False)

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """What step 0 is fed, of a pack's states. [num_tokens, hidden]"""

    @abstractmethod
    def step(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        pack: Pack,
        past: list[KeysValues],
    ) -> tuple[Tensor, Tensor]:
        """One step of all chains: (for the head, for the next step), each [num_tokens, hidden]."""

    @property
    def vocab_size(self) -> int:
        return self.shared.vocab_size

    def unroll(self, pack: Pack, num_steps: int) -> Iterator[Tensor]:
        hidden = self.begin(pack.states)
        past: list[KeysValues] = []
        for step in range(num_steps):
            embedded = F.embedding(pack.ids.roll(-1 - step), self.shared.embedding)
            cos, sin = self.rotary(hidden, (pack.positions + step)[None])
            output, hidden = self.step(hidden, embedded, (cos[0], sin[0]), pack, past)
            yield output

    def logits(self, hidden: Tensor) -> Tensor:
        return self.shared.logits(hidden)


class Eagle(DraftHead):
    """EAGLE (Li and others 2024): from the last state and the next token's embedding a layer makes the next state.

    As published, the layer has no norm before its attention, and its output goes to the head as it is.
    """

    fc_inputs = 2

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.layers = nn.ModuleList([_EagleLayer(self.config)])

    def begin(self, states: Tensor) -> Tensor:
        return states[:, -self.config.hidden_size :]

    def step(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        pack: Pack,
        past: list[KeysValues],
    ) -> tuple[Tensor, Tensor]:
        made = self.layers[0](self.fc(torch.cat([embedded, hidden], -1)), rotary, pack, past)
        return made, made


class _EagleLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = ChainAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], pack: Pack, past: list[KeysValues]
    ) -> Tensor:
        hidden = hidden + self.self_attn(hidden, rotary, pack, past)
        made: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return made


class Eagle3(DraftHead):
    """EAGLE-3 (Li and others 2025): fuses three of the target's states; what it feeds itself may be any vector."""

    num_fused = 3
    fc_inputs = 3

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.midlayer = _Eagle3Layer(self.config)
        self.norm = LlamaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def begin(self, states: Tensor) -> Tensor:
        made: Tensor = self.fc(states[:, : self.num_fused * self.config.hidden_size])
        return made

    def step(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        pack: Pack,
        past: list[KeysValues],
    ) -> tuple[Tensor, Tensor]:
        made = self.midlayer(hidden, embedded, rotary, pack, past)
        return self.norm(made), made


class _Eagle3Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.self_attn = ChainAttention(config, 2 * size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        pack: Pack,
        past: list[KeysValues],
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, rotary, pack, past)
        made: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return made


class SmallModel(Network):
    """A causal language model of the target's tokenizer (OSD: Liu and others 2023), all of it trained.

    model: a transformers model that was loaded with `attn_implementation=ATTENTION_NAME`.
    """

    lead = 0

    def __init__(self, model: Any) -> None:
        super().__init__()
        if model.config._attn_implementation != ATTENTION_NAME:
            raise CheckpointError(
                f"the small model attends through {model.config._attn_implementation!r}: load it with "
                f"attn_implementation={ATTENTION_NAME!r}"
            )
        self.model, self.config = model, model.config
        self._scale = logit_scale(model)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def unroll(self, pack: Pack, num_steps: int) -> Iterator[Tensor]:
        hidden = self.model.base_model(
            input_ids=pack.ids[None],
            position_ids=pack.positions[None],
            use_cache=False,
            document_lengths=pack.lengths,
        ).last_hidden_state[0]
        for step in range(num_steps):
            yield hidden.roll(-step, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._scale * hidden, self.model.get_output_embeddings().weight)


@dataclass
class _Decoded(MoeModelOutputWithPast):  # type: ignore[misc]
    """What any decoder may return."""

    cross_attentions: Any = None


def logit_scale(model: Any) -> float:
    """What a causal language model of transformers multiplies the product of state and head by: 1 for most, another
    constant for Granite, Cohere and MiniCPM. Raises CheckpointError for logits that are more than that.
    """
    head, decoder = model.get_output_embeddings().weight.detach(), model.get_decoder()
    states = torch.randn(1, PROBE_TOKENS, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head)
    plain = F.linear(states, head)
    # Small logits, which show a bias, and large ones, which show a cap.
    factors = torch.tensor([1.0, 100.0]).repeat(PROBE_TOKENS // 2)[None, :, None] / float(plain.abs().max())
    states, plain = states * factors.to(head), plain * factors.to(head)
    decoder.forward = lambda *_, **__: _Decoded(last_hidden_state=states)  # the decoder itself costs seconds
    try:
        with torch.no_grad():
            ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64)
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        del decoder.forward
    scale = float((logits * plain).sum() / plain.square().sum())
    error = float(((logits - scale * plain).abs().amax(-1) / logits.abs().amax(-1)).max())
    if not error <= PROBE_ERROR:
        raise CheckpointError(
            f"the logits of {type(model).__name__} are more than its last state times its head and a constant: "
            "drafters are trained for or from models without bias or cap on them, such as Llama, Qwen2 or Qwen3"
        )
    return 1.0 if abs(scale - 1.0) < PROBE_ERROR else scale


def head_config(target: Any) -> LlamaConfig:
    """Configuration of a head: one Llama layer of the target's widths and rotary positions (TLT 4.1).

    Differs: rotary positions are of all of a head's width, and those that depend on the longest position are plain ones
    of the same base. Raises CheckpointError for a target from whose configuration no Llama layer can be made.
    """
    if missing := [name for name in NEEDED if not hasattr(target, name)]:
        raise CheckpointError(
            f"a draft head needs {missing[0]} of the target's configuration, and {type(target).__name__} has none: "
            "train a small model with --method osd"
        )
    heads = target.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        hidden_act=target.hidden_act,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=_rotary_of(target.rope_parameters),
        tie_word_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def _rotary_of(target: Mapping[str, Any]) -> dict[str, Any]:
    """A head's, of its target's."""
    if target.get("rope_type") in LENGTH_BOUND:
        return {"rope_type": "default", "rope_theta": target["rope_theta"]}
    return {name: value for name, value in target.items() if name != "partial_rotary_factor"}
