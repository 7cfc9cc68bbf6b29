"""Which processors get Paceline's linear layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import processor
from paceline.config import EngineSettings

WIDE = "fpu avx2 avx512f avx512bw avx512vl"


@pytest.mark.parametrize(
    ("vendor", "flags", "wanted"),
    [
        ("GenuineIntel", WIDE, "paceline"),
        ("GenuineIntel", f"{WIDE} amx_bf16 amx_tile", "vllm"),
        ("GenuineIntel", "fpu avx2", "vllm"),
        ("AuthenticAMD", WIDE, "vllm"),
        ("AuthenticAMD", f"{WIDE} avx512_bf16", "paceline-dot"),
        ("AuthenticAMD", "fpu avx2 avx512_bf16", "vllm"),
        ("AuthenticAMD", "fpu avx2 fma", "paceline"),
        ("GenuineIntel", "fpu avx2 fma avx_vnni", "paceline"),
        ("GenuineIntel", "fpu avx2 fma avx_vnni avx_ne_convert", "vllm"),
        ("AuthenticAMD", "fpu avx2 fma avx512f", "vllm"),
        ("GenuineIntel", f"{WIDE} avx512_bf16", "paceline"),
    ],
)
def test_linear_layers_by_processor(
    vendor: str, flags: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(processor, "CPU_INFO", file)
    assert processor.cpu_features() == frozenset(flags.split())
    assert processor.best_linear_kernel() == wanted
    assert EngineSettings().linear_kernel == wanted


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    assert processor.cpu_features() == frozenset()
    assert processor.best_linear_kernel() == "vllm"
