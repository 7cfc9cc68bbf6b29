"""TRL's own GRPO trainer, unchanged, with PACELINE=1 in the environment and nothing else of ours in the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(completions, **_):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]

if __name__ == "__main__":
    policy, out = sys.argv[1:]
    config = GRPOConfig(
        output_dir=out, use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1, max_steps=3,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=24, learning_rate=1e-2,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.02, vllm_max_model_length=64,
    )
    rows = Dataset.from_list([{"prompt": f"{i},3,29:21 "} for i in range(1, 9)])
    trainer = GRPOTrainer(policy, reward_funcs=reward, args=config, train_dataset=rows)
    trainer.train()
    scheduler = trainer.vllm_generation.llm.llm_engine.engine_core.engine_core.scheduler
    budget = scheduler.loop.budget
    logs = [log for log in trainer.state.log_history if "reward" in log]
    print(json.dumps([type(scheduler).__name__, budget.num_steps, budget.last_drafted_step, logs]))
"""


def test_trl_alone_rolls_out_with_paceline(policy_dir: Path, tmp_path: Path) -> None:
    """The log-probabilities of the rollout follow the weights that TRL pushes; vLLM computes in bfloat16 here."""
    environment = {
        **os.environ,
        "PACELINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    words = [sys.executable, "-c", PROGRAM, str(policy_dir), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    scheduler, steps, drafted, logs = json.loads(done.stdout.splitlines()[-1])
    assert scheduler == "PacelineScheduler"
    assert 0 < drafted <= steps
    assert len(logs) == 3
    assert all(log["sampling/sampling_logp_difference/max"] < 0.1 for log in logs), logs
