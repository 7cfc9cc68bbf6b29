"""What the pretraining scripts share: a small Llama network, batches, the training loop, sampling, agreement.

Runs on a GPU if torch sees one, otherwise on the CPU. Documents are sorted by length within a step and padded, never
packed: each starts at position 0, as in a rollout.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.tasks.alphabet import BOS_ID, EOS_ID, PAD_ID

IGNORED = -100
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama network; heads are 64 wide."""

    hidden: int
    layers: int
    intermediate: int
    kv_heads: int


def build_model(shape: Shape, vocabulary: int) -> Any:
    """A fresh network over ids below `vocabulary`, embeddings tied."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 64),
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


# --- data -------------------------------------------------------------------------------------------------

Document = tuple[list[int], int]
"""Token ids, and how many of them are the prompt's."""


def read_responses(file: Path) -> list[Document]:
    """The responses in a file of `paceline rollout`."""
    with file.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["prompt_ids"] + row["tokens"], len(row["prompt_ids"])) for row in rows]


def repeat_documents(pool: list[Document], seed: int) -> Iterator[Document]:
    """The documents over and over, in new orders."""
    pool, order = list(pool), Random(seed)
    while True:
        order.shuffle(pool)
        yield from pool


Batch = tuple[
    Tensor, Tensor
]  # ids [rows, width] int64, labels [rows, width - 1] int64 (IGNORED: prompt, padding)


def collect_step(documents: Iterator[Document], tokens: int, micro_tokens: int) -> list[Batch]:
    """One optimizer step: about `tokens` tokens, sorted by length, in batches of at most `micro_tokens`
    with padding."""
    rows: list[Document] = []
    while tokens > 0:
        rows.append(next(documents))
        tokens -= len(rows[-1][0])
    rows.sort(key=lambda row: len(row[0]))
    batches: list[Batch] = []
    part: list[Document] = []
    for row in rows:
        if part and (len(part) + 1) * len(row[0]) > micro_tokens:
            batches.append(_pad(part))
            part = []
        part.append(row)
    batches.append(_pad(part))
    return batches


def _pad(rows: list[Document]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), PAD_ID)
    labels = torch.full((len(rows), width), IGNORED)
    for r, (tokens, num_prompt) in enumerate(rows):
        ids[r, : len(tokens)] = torch.tensor(tokens)
        labels[r, num_prompt : len(tokens)] = ids[r, num_prompt : len(tokens)]
    return ids, labels[:, 1:]


# --- training ---------------------------------------------------------------------------------------------


def build_optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest (embedding, norms, biases)."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over the first steps, then a cosine down to 2 % of the peak."""
    warm = min(1.0, (step + 1) / min(50, steps))
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def compute_loss(model: Any, teacher: Any | None, ids: Tensor, labels: Tensor) -> Tensor:
    """Sum over the response tokens of the cross entropy or, with a teacher, of KL(teacher || model), in
    nats."""
    wanted = labels != IGNORED
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1][wanted].float()
    if teacher is None:
        return F.cross_entropy(logits, labels[wanted], reduction="sum")
    with torch.no_grad():
        goal = teacher(input_ids=ids, use_cache=False).logits[:, :-1][wanted].float().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), goal, reduction="sum", log_target=True)


def train(
    model: Any,
    teacher: Any | None,
    documents: Iterator[Document],
    arguments: argparse.Namespace,
    save: Callable[[], None],
) -> None:
    """`arguments.steps` optimizer steps in place; prints nats per response token, saves now and then and at the end."""
    device = next(model.parameters()).device
    optimizers = build_optimizers(model, arguments.rate)
    started_s, seen, loss_sum, loss_tokens = time.perf_counter(), 0, 0.0, 0
    for step in range(arguments.steps):
        batches = collect_step(documents, arguments.tokens_per_step, arguments.micro_tokens)
        count = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        for ids, labels in batches:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = compute_loss(model, teacher, ids.to(device), labels.to(device))
            (loss / count).backward()
            loss_sum += loss.item()
        loss_tokens, seen = loss_tokens + count, seen + arguments.tokens_per_step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule_rate(step, arguments.steps, arguments.rate)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % arguments.print_every == 0 or step + 1 == arguments.steps:
            elapsed_s = time.perf_counter() - started_s
            print(
                f"step {step + 1} loss {loss_sum / loss_tokens:.4f} tokens {seen} elapsed_s {elapsed_s:.0f}",
                flush=True,
            )
            loss_sum, loss_tokens = 0.0, 0
        if arguments.save_every and (step + 1) % arguments.save_every == 0:
            save()
    save()


def save_checkpoint(model: Any, tokenizer: Any, folder: Path) -> None:
    """bfloat16 weights, configuration and tokenizer, in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding: a copy would double the file
    }
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


# --- measuring --------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_responses(model: Any, prompts: list[list[int]], max_new_tokens: int, seed: int) -> list[list[int]]:
    """One response per prompt at temperature 1, EOS included; plain batched decoding with a key-value
    cache."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD_ID] * (width - len(p)) + p for p in prompts], device=device)
    mask = (ids != PAD_ID).long()
    rows = torch.arange(len(prompts), device=device)
    responses: list[list[int]] = [[] for _ in prompts]
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for _ in range(max_new_tokens):
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        weights = output.logits[:, -1].float().softmax(-1)
        drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            responses[row].append(token)
        running = drawn != EOS_ID
        if not running.any():
            break
        if not running.all():
            cache.batch_select_indices(running.nonzero()[:, 0])
            rows, mask, positions, drawn = rows[running], mask[running], positions[running], drawn[running]
        ids, positions = drawn[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return responses


def compute_coupled(p: Tensor, q: Tensor) -> Tensor:
    """Probability that the Gumbel argmaxes of two distributions over the same noise agree, for each row.

    p, q: [rows, vocabulary] float64. It is sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) (Daliri, Musco, Suresh 2024). With the
    ids in falling order of p/q the maximum is the first ratio for the ids up to x and the second for those after it.
    """
    order = (p / q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    sums = p.cumsum(-1) / p + (q.sum(-1, keepdim=True) - q.cumsum(-1)) / q
    return (1 / sums).sum(-1)


@torch.no_grad()
def measure_agreement(
    policy: Any, drafter: Any, prompts: list[list[int]], responses: list[list[int]]
) -> dict[str, float]:
    """Means over the response tokens of policy samples, temperature 1: how often drafts would be accepted.

    `overlap` is 1 - TV, the most that any scheme reaches; `coupled` is with shared dice (`compute_coupled`).
    """
    device = next(policy.parameters()).device
    sums = torch.zeros(5, dtype=torch.float64)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt + response], device=device)
        p, q = (
            m(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1).clamp_min(1e-300)
            for m in (policy, drafter)
        )
        overlap = torch.minimum(p, q).sum(-1)
        greedy = p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
        entropy = torch.special.entr(p).sum(-1)
        means = (overlap, compute_coupled(p, q), greedy, entropy, torch.ones_like(entropy))
        sums += torch.stack([x.sum().cpu() for x in means])
    names = ("overlap", "coupled", "greedy", "entropy_nats")
    return {name: (sums[i] / sums[4]).item() for i, name in enumerate(names)}


def sample_in_batches(
    policy: Any, prompts: list[list[int]], max_new_tokens: int, seed: int, batch: int
) -> list[list[int]]:
    """`sample_responses`, `batch` prompts at a time."""
    responses: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        responses += sample_responses(policy, part, max_new_tokens, seed + start)
    return responses


def describe_lengths(responses: list[list[int]]) -> dict[str, Any]:
    """Percentiles of the lengths in tokens, and the share of responses that end by themselves."""
    lengths = sorted(map(len, responses))
    return {
        "finish_rate": sum(response[-1] == EOS_ID for response in responses) / len(responses),
        "length_tokens": {
            f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (10, 50, 90, 99)
        },
        "mean_length_tokens": sum(lengths) / len(lengths),
    }


def load_model(folder: Path) -> Any:
    """A stored checkpoint in float32, in evaluation mode, on the GPU if there is one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


# --- command line -----------------------------------------------------------------------------------------


def add_training_options(command: argparse.ArgumentParser, steps: int, rate: float) -> None:
    """The options that `train` reads, with this default number of steps and peak rate."""
    command.add_argument("--steps", type=int, default=steps)
    command.add_argument("--rate", type=float, default=rate, help="peak learning rate")
    command.add_argument("--tokens-per-step", type=int, default=8192)
    command.add_argument("--micro-tokens", type=int, default=2048, help="padded tokens per forward pass")
    command.add_argument("--start", type=Path, metavar="DIR", help="go on from this checkpoint")
    command.add_argument("--threads", type=int, default=torch.get_num_threads())
    command.add_argument("--print-every", type=int, default=50)
    command.add_argument("--save-every", type=int, default=0)
    command.add_argument("--quick", action="store_true", help="a tiny model, a few steps")


def add_sampling_options(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """The options of a command that samples from a policy, with this default limit."""
    command.add_argument("--policy", type=Path, required=True)
    command.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--threads", type=int, default=torch.get_num_threads())


def start_model(shape: Shape, vocabulary: int, arguments: argparse.Namespace) -> Any:
    """The network to train: fresh, or that of `--start`; prints its size."""
    torch.manual_seed(arguments.seed)
    model = load_model(arguments.start).train() if arguments.start else build_model(shape, vocabulary)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    return model
