"""Numbers of the pages come from result files, and a stale one fails the check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import fill_numbers  # noqa: E402
import tables  # noqa: E402

ROWS = [
    {
        "case": "8x16",
        "system": "plain",
        "ratio": 1.0,
        "ratio_range": [0.9, 1.1],
        "tokens": 1500,
        "equal": None,
    },
    {"case": "8x16", "system": "draft model", "ratio": 1.675, "ratio_range": [1.6, 1.8], "tokens": 80870},
    {"case": "2x4", "system": "plain", "ratio": 1.06, "ratio_range": [1.0, 1.2], "tokens": 500},
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    result = {"rows": ROWS, "systems": [{"name": "one", "seconds": 12.3}]}
    (tmp_path / "benchmarks/results/speed.json").write_text(json.dumps(result))
    return tmp_path


def fill(root: Path, words: str) -> str:
    """What stands in the place of a number."""
    results = fill_numbers.Results(root / "benchmarks/results")
    text, complaints = fill_numbers.fill(f"a <!--n {words}-->old<!--/n--> b", results)
    assert not complaints, complaints
    return text.removeprefix(f"a <!--n {words}-->").removesuffix("<!--/n--> b")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("speed 8x16 draft_model ratio .2f", "1.68"),
        ("speed system=plain case=2x4 ratio gain:.0f", "6"),
        ("speed 8x16 plain ratio_range.1 .1f", "1.1"),
        ("speed sum tokens ,d", "82,870"),
        ("speed plain min ratio .2f", "1.00"),
        ("speed plain count ratio d", "2"),
        ("speed 8x16 draft_model system s", "draft model"),
        ("speed.systems seconds .0f", "12"),
    ],
)
def test_a_number_is_found_by_its_words(root: Path, words: str, text: str) -> None:
    assert fill(root, words) == text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("fleet ratio .2f", "no fleet.json"),
        ("speed.nothing ratio .2f", "no list 'nothing'"),
        ("speed 8x16 ratio .2f", "2 rows"),
        ("speed 9x9 plain ratio .2f", "0 rows"),
        ("speed 2x4 speed .2f", "no 'speed'"),
        ("speed 8x16 plain equal s", "is empty"),
        ("speed 2x4 ratio_range.7 .2f", "no 'ratio_range.7'"),
        ("speed 2x4 ratio twice:.0f", "no form 'twice'"),
        ("speed 2x4 ratio d", "does not go with"),
        ("speed", "write file"),
    ],
)
def test_what_names_no_number_is_said(root: Path, words: str, complaint: str) -> None:
    text = f"<!--n {words}-->7<!--/n-->"
    filled, complaints = fill_numbers.fill(text, fill_numbers.Results(root / "benchmarks/results"))
    assert filled == text
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_an_open_marker_is_said(root: Path) -> None:
    results = fill_numbers.Results(root / "benchmarks/results")
    assert fill_numbers.fill("<!--n speed 2x4 ratio .2f-->7", results)[1]
    assert fill_numbers.fill("<!--table papers.claims-->\n", results)[1]


def test_check_fails_until_the_page_is_filled(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "docs/page.md"
    (root / "README.md").write_text("no numbers\n")
    page.write_text("| <!--n speed 2x4 ratio .2f-->9.99<!--/n--> |\n")
    assert fill_numbers.main(["--check"], root) == 1
    assert "docs/page.md is stale" in capsys.readouterr().err
    assert "9.99" in page.read_text()
    assert fill_numbers.main([], root) == 0
    assert page.read_text() == "| <!--n speed 2x4 ratio .2f-->1.06<!--/n--> |\n"
    assert fill_numbers.main(["--check"], root) == 0


def test_a_table_is_written_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(rows: Any) -> str:
        return "\n".join(row["case"] for row in rows("speed"))

    monkeypatch.setitem(fill_numbers.TABLES, "speed.cases", cases)
    results = fill_numbers.Results(root / "benchmarks/results")
    text, complaints = fill_numbers.fill("<!--table speed.cases-->\nold\n<!--/table-->\n", results)
    assert not complaints
    assert text == "<!--table speed.cases-->\n\n8x16\n8x16\n2x4\n\n<!--/table-->\n"
    assert fill_numbers.fill(text, results)[0] == text


def table(name: str, rows: list[dict[str, Any]]) -> str:
    return fill_numbers.TABLES[name](lambda source: rows)


def test_the_control_is_told_only_where_it_was_measured() -> None:
    row = {
        "dtype": "float32",
        "diverged_tokens": 3,
        "tokens": 100_000,
        "per_million": 30.0,
        "logits_different": 9,
    }
    assert "measured again" in table("exactness.control", [row, row | {"invariant": True}])
    rows = [row | {"invariant": False}, row | {"invariant": False, "diverged_tokens": 5, "per_million": 50.0}]
    assert "50 of a million tokens in float32 (5 of 100,000)" in table("exactness.control", rows)
    equal = [one | {"diverged_tokens": 0, "per_million": 0.0} for one in rows]
    assert "9 of 100,000 tokens in float32 logits differed in some bit, and no token did" in table(
        "exactness.control", equal
    )
    same = row | {"invariant": False, "diverged_tokens": 0, "per_million": 0.0, "logits_different": 0}
    told = table("exactness.control", [same, same, same | {"dtype": "bfloat16"}])
    assert "(200,000 tokens on the CPU" in told
    assert "so it shows none" in told


def test_the_drivers_share_of_a_core_has_rays_part_in_it() -> None:
    rows = [
        {"case": "64 workers x 128 chunks at 100 ms", "value": 30.0},
        {"case": "Ray brings a report of 128 growths", "value": 500.0},
    ]
    assert table("driver_load", rows).endswith("| both | **62%** |")


def test_a_missed_limit_is_said() -> None:
    rows = [{"case": "one", "ms": 0.4, "limit_ms": 0.3}, {"case": "other", "ms": 7.0, "limit_ms": 50.0}]
    assert table("decisions", rows).splitlines()[2:] == [
        "| one | 0.4 | 0.3 | **no** |",
        "| other | 7 | 50 | yes |",
    ]


def test_cases_stand_by_size_in_whatever_order_they_ran() -> None:
    bars = [
        {"case": case, "bar": "over the best rival", "needed": 1.0, "reached": 1.1, "met": True}
        for case in ("8x16", "1x1", "2x4")
    ]
    lines = tables.list_bars(lambda source: {"speed.bars": bars}[source]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["1 x 1", "2 x 4", "8 x 16"]
