"""A fleet on a Ray cluster that was there before: placed by resources, and the loss of a whole node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fleet_parts import POLICY, Generate, make_requests
from vllm import SamplingParams

SCRIPT = """
import json, sys
from paceline.fleet.cluster import import_ray
ray = import_ray()
from ray.cluster_utils import Cluster
from vllm import SamplingParams
from paceline.config import EngineSettings, FleetSettings
from paceline.fleet.fleet import Fleet
from paceline.types import RolloutRequest

policy, job = sys.argv[1], json.load(open(sys.argv[2]))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"slot": 1}})
other = cluster.add_node(num_cpus=4, resources={"slot": 1})
cluster.wait_for_nodes()
settings = FleetSettings(
    workers=2, chunk_tokens=64, progress_ms=20.0, address=cluster.address, resources_per_worker={"slot": 1}
)
requests = [RolloutRequest(tuple(prompt), 700, key=key) for prompt, key in job]
with Fleet(policy, settings, EngineSettings(), dtype="float32", max_model_len=800, kv_cache_bytes=1 << 27) as fleet:
    while any(status.state != "up" for status in fleet.board.workers.values()):
        fleet.advance()
    found = {}
    fleet.submit(requests, SamplingParams(temperature=1.0, ignore_eos=True))
    while fleet.num_unfinished:
        if other is not None and min(status.num_tokens for status in fleet.board.workers.values()) > 300:
            cluster.remove_node(other, allow_graceful=False)
            other = None
        for one in fleet.advance(0.02):
            assert one.index not in found
            found[one.index] = one.response.tokens
    losses = sum(status.num_losses for status in fleet.board.workers.values())
cluster.shutdown()
json.dump({"losses": losses, "tokens": [found[i] for i in range(len(requests))]}, open(sys.argv[3], "w"))
"""


@pytest.mark.slow
def test_a_node_is_lost(plain: Generate, prompts: list[tuple[int, ...]], tmp_path: Path) -> None:
    requests = make_requests(prompts[:4], 4, 700)
    wanted = plain(requests, SamplingParams(temperature=1.0, ignore_eos=True))
    job, script, out = tmp_path / "job.json", tmp_path / "fleet.py", tmp_path / "out.json"
    job.write_text(json.dumps([(response.request.prompt, response.key) for response in wanted]))
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, POLICY, job, out], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["losses"] == 1
    assert [tuple(tokens) for tokens in found["tokens"]] == [response.tokens for response in wanted]
