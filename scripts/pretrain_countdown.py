"""Make the Countdown policy and its small drafter from generated search traces, and measure them.

    python scripts/pretrain_countdown.py policy --out DIR
        base policy from traces
    python scripts/pretrain_countdown.py drafter --teacher DIR --out DIR
        small drafter, distilled from a policy on traces
    python scripts/pretrain_countdown.py prompts --out FILE; paceline rollout DIR FILE --out RESPONSES
    python scripts/pretrain_countdown.py drafter --teacher DIR --start DIR --responses RESPONSES --out DIR
        the drafter distilled further, on what the policy itself writes
    python scripts/pretrain_countdown.py measure --policy DIR [--drafter DIR]

Runs on a GPU if torch sees one, otherwise on the CPU. `--quick` makes a tiny model in seconds (for
tests). Documents are sorted by length within a step and padded, never packed: each starts at position 0,
as in a rollout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.tasks.alphabet import (
    ALPHABET,
    BOS_ID,
    EOS_ID,
    PAD_ID,
    build_tokenizer,
    encode_prompt,
    encode_trace,
)
from paceline.tasks.traces import Problem, ProblemRange, stream_examples

IGNORED = -100
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama network; heads are 64 wide."""

    hidden: int
    layers: int
    intermediate: int
    kv_heads: int


POLICY = Shape(hidden=256, layers=4, intermediate=704, kv_heads=2)
DRAFTER = Shape(hidden=128, layers=2, intermediate=352, kv_heads=1)
QUICK = Shape(hidden=64, layers=1, intermediate=96, kv_heads=1)


def build_model(shape: Shape) -> Any:
    """A fresh network over the Countdown alphabet, embeddings tied."""
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
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
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


# --- data -------------------------------------------------------------------------------------------------


def stream_problems(seed: int, hard_share: float, max_tokens: int) -> Iterator[tuple[Problem, str]]:
    """(problem, trace) without end; a `hard_share` of the problems has four numbers."""
    easy = stream_examples(seed, ProblemRange(), max_tokens)
    hard = stream_examples(seed + 1, ProblemRange(min_numbers=4, max_numbers=4), max_tokens)
    owed = 0.0
    while True:
        owed += hard_share
        yield next(hard) if owed >= 1 else next(easy)
        owed -= float(owed >= 1)


def stream_documents(seed: int, hard_share: float, max_tokens: int) -> Iterator[tuple[list[int], int]]:
    """(token ids, number of prompt tokens) of traces, without end."""
    for problem, trace in stream_problems(seed, hard_share, max_tokens):
        prompt = encode_prompt(problem.prompt)
        yield prompt + encode_trace(trace), len(prompt)


def repeat_responses(file: Path, seed: int) -> Iterator[tuple[list[int], int]]:
    """As `stream_documents`: the responses in a file of `paceline rollout`, over and over in new orders.

    They hold what no trace does: slips of arithmetic, and searches longer than any that was generated.
    """
    with file.open() as lines:
        rows = [json.loads(line) for line in lines]
    pool = [(row["prompt_ids"] + row["tokens"], len(row["prompt_ids"])) for row in rows]
    order = Random(seed)
    while True:
        order.shuffle(pool)
        yield from pool


Batch = tuple[
    Tensor, Tensor
]  # ids [rows, width] int64, labels [rows, width - 1] int64 (IGNORED: prompt, padding)


def collect_step(documents: Iterator[tuple[list[int], int]], tokens: int, micro_tokens: int) -> list[Batch]:
    """One optimizer step: about `tokens` tokens, sorted by length, in batches of at most `micro_tokens`
    with padding."""
    rows: list[tuple[list[int], int]] = []
    while tokens > 0:
        rows.append(next(documents))
        tokens -= len(rows[-1][0])
    rows.sort(key=lambda row: len(row[0]))
    batches: list[Batch] = []
    part: list[tuple[list[int], int]] = []
    for row in rows:
        if part and (len(part) + 1) * len(row[0]) > micro_tokens:
            batches.append(_pad(part))
            part = []
        part.append(row)
    batches.append(_pad(part))
    return batches


def _pad(rows: list[tuple[list[int], int]]) -> Batch:
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


def train(model: Any, teacher: Any | None, arguments: argparse.Namespace) -> None:
    """`arguments.steps` optimizer steps in place; prints nats per response token."""
    device = next(model.parameters()).device
    optimizers = build_optimizers(model, arguments.rate)
    if teacher is not None and arguments.responses:
        documents = repeat_responses(arguments.responses, arguments.seed)
    else:
        documents = stream_documents(arguments.seed, arguments.hard_share, arguments.max_tokens)
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
            save_checkpoint(model, arguments.out)


def save_checkpoint(model: Any, folder: Path) -> None:
    """bfloat16 weights, configuration and tokenizer, in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder, state_dict=state)
    build_tokenizer(MAX_POSITIONS).save_pretrained(folder)


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


@torch.no_grad()
def measure_agreement(
    policy: Any, drafter: Any, prompts: list[list[int]], responses: list[list[int]]
) -> dict[str, float]:
    """Means over the response tokens of policy samples, temperature 1: how often drafts would be accepted.

    `overlap` is 1 - TV, the most that any scheme reaches; `coupled` is the exact probability that two
    Gumbel argmaxes over the same noise agree, sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) (Daliri, Musco,
    Suresh 2024).
    """
    device = next(policy.parameters()).device
    sums = torch.zeros(5, dtype=torch.float64)
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt + response], device=device)
        p, q = (
            m(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1) for m in (policy, drafter)
        )
        ratio = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
        coupled = (1 / ratio.sum(-1)).nan_to_num(0.0).sum(-1)
        overlap = torch.minimum(p, q).sum(-1)
        greedy = p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
        entropy = torch.special.entr(p).sum(-1)
        sums += torch.stack(
            [x.sum().cpu() for x in (overlap, coupled, greedy, entropy, torch.ones_like(entropy))]
        )
    names = ("overlap", "coupled", "greedy", "entropy_nats")
    return {name: (sums[i] / sums[4]).item() for i, name in enumerate(names)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Held-out solve rate, length percentiles and finish rate of a policy; agreement with a drafter if
    one is given."""
    from transformers import AutoTokenizer

    from paceline.tasks import load_task

    policy, tokenizer = load_model(arguments.policy), AutoTokenizer.from_pretrained(arguments.policy)
    task = load_task("countdown", max_numbers=arguments.max_numbers)
    rows = task.held_out_rows(arguments.problems, arguments.seed)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    responses: list[list[int]] = []
    for start in range(0, len(prompts), arguments.batch):
        part = prompts[start : start + arguments.batch]
        responses += sample_responses(policy, part, arguments.max_new_tokens, arguments.seed + start)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [task.reward(text, row) for text, row in zip(texts, rows, strict=True)]
    lengths = sorted(map(len, responses))
    result: dict[str, Any] = {
        "problems": len(rows),
        "solve_rate": sum(reward == 1.0 for reward in rewards) / len(rows),
        "mean_reward": sum(rewards) / len(rows),
        "finish_rate": sum(response[-1] == EOS_ID for response in responses) / len(rows),
        "length_tokens": {
            f"p{q}": lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (50, 90, 99)
        },
        "mean_length_tokens": sum(lengths) / len(lengths),
    }
    if arguments.drafter:
        drafter = load_model(arguments.drafter)
        result["agreement"] = measure_agreement(policy, drafter, prompts, responses)
    if arguments.show:
        for prompt, text, reward in list(zip(prompts, texts, rewards, strict=True))[: arguments.show]:
            print(f"{reward:.1f} {tokenizer.decode(prompt, skip_special_tokens=True)}{text}")
    return result


def load_model(folder: Path) -> Any:
    """A stored checkpoint in float32, in evaluation mode, on the GPU if there is one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


# --- command line -----------------------------------------------------------------------------------------


def write_prompts(arguments: argparse.Namespace) -> None:
    """The prompts of `--problems` problems, as `paceline rollout` takes them."""
    problems = stream_problems(arguments.seed, arguments.hard_share, arguments.max_tokens)
    with arguments.out.open("w") as file:
        for problem, _ in itertools.islice(problems, arguments.problems):
            file.write(json.dumps({"prompt": problem.prompt}) + "\n")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    policy = commands.add_parser("policy", help="train the base policy on traces")
    drafter = commands.add_parser("drafter", help="distil a small drafter from a policy")
    drafter.add_argument("--teacher", type=Path, required=True)
    drafter.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help="the teacher's, from 'paceline rollout', in place of traces",
    )
    prompts = commands.add_parser("prompts", help="write prompts for 'paceline rollout'")
    prompts.add_argument("--problems", type=int, default=4096)
    for command in (policy, drafter, prompts):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--max-tokens", type=int, default=640, help="longest trace")
        command.add_argument("--hard-share", type=float, default=0.05, help="share of four-number problems")
        command.add_argument("--seed", type=int, default=0)
    for command, steps, rate in ((policy, 2400, 4e-3), (drafter, 1200, 4e-3)):
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--rate", type=float, default=rate, help="peak learning rate")
        command.add_argument("--tokens-per-step", type=int, default=8192)
        command.add_argument("--micro-tokens", type=int, default=2048, help="padded tokens per forward pass")
        command.add_argument("--start", type=Path, metavar="DIR", help="go on from this checkpoint")
        command.add_argument("--threads", type=int, default=torch.get_num_threads())
        command.add_argument("--print-every", type=int, default=50)
        command.add_argument("--save-every", type=int, default=0)
        command.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    measuring = commands.add_parser("measure", help="held-out solve rate, lengths, agreement")
    measuring.add_argument("--policy", type=Path, required=True)
    measuring.add_argument("--drafter", type=Path)
    measuring.add_argument("--problems", type=int, default=512)
    measuring.add_argument("--max-numbers", type=int, default=3)
    measuring.add_argument("--max-new-tokens", type=int, default=512)
    measuring.add_argument("--batch", type=int, default=64)
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--show", type=int, default=0, help="print so many responses")
    measuring.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    if arguments.command == "prompts":
        write_prompts(arguments)
        return
    torch.set_num_threads(arguments.threads)
    if arguments.command == "measure":
        print(json.dumps(measure(arguments), indent=1))
        return
    if arguments.quick:
        arguments.steps, arguments.tokens_per_step = min(arguments.steps, 20), 2048
    torch.manual_seed(arguments.seed)
    shape = QUICK if arguments.quick else POLICY if arguments.command == "policy" else DRAFTER
    model = load_model(arguments.start).train() if arguments.start else build_model(shape)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    teacher = load_model(arguments.teacher) if arguments.command == "drafter" else None
    train(model, teacher, arguments)
    save_checkpoint(model, arguments.out)


if __name__ == "__main__":
    main()
