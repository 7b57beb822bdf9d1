"""README and docs: links lead somewhere, figures are those of result files, what is shown runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_results_that_are_named_are_there(page: Path) -> None:
    there = {file.name for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert set(re.findall(r"(?<![\w*-])[a-z][\w.-]*-(?:h200|cpu)[\w-]*\.json", page.read_text())) <= there


def test_readme_is_one_screen_and_starts_with_a_picture() -> None:
    assert len(README.splitlines()) <= 90
    assert "![" in README.split("\n## ", 1)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_installed_from_where_it_is_not(page: Path) -> None:
    """The package is on no index: whoever reads this has the repository."""
    assert not re.search(
        r"pip install [^\n]*\bostinato\b(?!/)[^\n]*", page.read_text().replace("bin/ostinato", "")
    )


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    rows = {row["batch"]: row for row in result("decode-qwen3-0.6b-h200.json")["rows"]}
    off = {row["batch"]: row["tpot_ms_off"] for row in result("on-off-qwen3-0.6b-h200.json")["rows"]}
    peers = {batch: rows[batch]["peer_figures"]["tpot_ms"] for batch in (1, 256)}
    for batch, ours in (
        (1, f"{rows[1]['tpot_ms']:.2f} (without graphs: {off[1]:.1f})"),
        (256, f"{rows[256]['tpot_ms']:.2f}"),
    ):
        row = f"batch {batch} | {ours} | {peers[batch]['SGLang']} | {peers[batch]['vLLM']} |"
        assert row in README


def test_kernels_in_cuda_are_as_many_as_the_pages_say() -> None:
    numbers = {"five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12}
    told = [
        re.findall(r"(\w+) kernels (?:are|in) CUDA C\+\+", (ROOT / "docs" / page).read_text())
        for page in ("layout.md", "decisions.md")
    ]
    there = len(list((ROOT / "src/ostinato/kernels").rglob("*.cu")))
    assert [[numbers[word.lower()] for word in words] for words in told] == [[there], [there]]


def test_code_of_the_readme_runs() -> None:
    engine, runtime = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(engine, "README.md", "exec")  # it fetches a model
    names: dict[str, Any] = {}
    exec(runtime, names)
    assert names["y"].shape == (5, 8)


def test_figures_of_ordinary_programs_are_those_of_the_result() -> None:
    page, measured = (ROOT / "docs/graphs.md").read_text(), result("ordinary-programs-cpu.json")
    counts = measured["outcomes"]
    counts["different"] = counts.pop("wrong") + counts.pop("crashed")
    section = page.split("### What ordinary code does")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z, ]+) \| (\d+) \|", section, re.MULTILINE)
    assert {name.replace(", ", "-").replace(" ", "-"): int(count) for name, count in rows} == counts
    assert section.strip().startswith(f"{sum(counts.values())} programs")
    assert f"{measured['false_alarms']} programs that are right" in section
