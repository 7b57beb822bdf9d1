"""`ostinato bench`: every benchmark end to end on a CPU, with a model of a few thousand weights."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ostinato.bench import check, contest, startup
from ostinato.bench import http_load as bench_http
from ostinato.bench.contest import Run
from ostinato.bench.subject import Subject
from ostinato.bench.workload import Workload
from ostinato.cli.main import app
from ostinato.tools.results import BenchError

SMALL = ("--chunked-prefill-size", "64", "--cuda-graph-prefill-tokens", "64", "--enable-cudagraph-gc")


def bench(tmp_path: Path, command: str, model: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the printed text of a benchmark; where pictures can be drawn, there must be one."""
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    drawing = importlib.util.find_spec("matplotlib") is not None
    files = ("--json", str(result), *(("--png", str(picture)) if drawing else ()))
    ran = CliRunner().invoke(app, ["bench", command, "--model", str(model), *arguments, *SMALL, *files])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    assert not drawing or picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(result.read_text())
    assert content["benchmark"] == command
    assert content["machine"]["torch"]
    assert content["settings"]["model"]["name"] == "tiny"
    assert str(model.parent) not in result.read_text(), "a result must not tell where its maker's files are"
    return content, ran.stdout


def test_decode(tmp_path: Path, tiny_config: Path) -> None:
    lengths = ("--batch-sizes", "1,3", "--input-len", "8,24", "--output-len", "6", "--repeats", "1")
    result, text = bench(tmp_path, "decode", tiny_config, *lengths)
    assert [(row["batch"], row["input_len"]) for row in result["rows"]] == [(1, 8), (3, 8), (1, 24), (3, 24)]
    for row in result["rows"]:
        assert [row["tpot_ms"]] == row["tpot_ms_each"]
        assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["tpot_ms"])
    assert all(run["equal"] for check in result["checks"] for run in check["runs"])
    assert result["engine"]["graphs"]["decode"]["number"] > 0
    assert result["engine"]["eager_steps"] == {}
    assert "TPOT ms" in text


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_decode_beside_transformers(tmp_path: Path, tiny_config: Path) -> None:
    pytest.importorskip("transformers")
    lengths = ("--batch-sizes", "1,2", "--input-len", "8", "--output-len", "4", "--repeats", "2")
    result, text = bench(tmp_path, "decode", tiny_config, *lengths, "--peer", "transformers")
    single, double = (row["measured_peers"] for row in result["rows"])
    assert set(single) == {"transformers"}
    assert set(double) == {"transformers", "transformers, one by one"}
    assert all(found["tokens_per_s_ratio"] > 0 for found in double.values())
    assert result["peers"]["transformers"]["version"]
    assert "one by one" in text


def test_throughput(tmp_path: Path, tiny_config: Path) -> None:
    result, _ = bench(tmp_path, "throughput", tiny_config, "--num-prompts", "4", "--scale", "0.03")
    assert result["settings"]["output_tokens"] == Workload.mixed(4, 131, 0.03).output_tokens
    assert result["tokens_per_s"] > 0
    assert result["checks"][0]["runs"][0]["equal"]


def test_graphs_on_off(tmp_path: Path, tiny_config: Path) -> None:
    lengths = ("--batch-sizes", "1,2", "--input-len", "8", "--output-len", "5", "--repeats", "1")
    result, _ = bench(tmp_path, "graphs-on-off", tiny_config, *lengths)
    for row in result["rows"]:
        assert row["equal_tokens"] == 1
        assert row["gain"] == pytest.approx(row["tpot_ms_off"] / row["tpot_ms_on"])
    assert result["engine"]["eager_steps"] == {}


def test_host(tmp_path: Path, tiny_config: Path) -> None:
    result, text = bench(
        tmp_path, "host", tiny_config, "--batch-sizes", "1,4", "--output-len", "12", "--repeats", "1"
    )
    for row in result["rows"]:
        us = row["us"]
        assert set(us) == {"schedule", "launch", "wait", "complete", "deliver"}
        assert row["schedule_and_launch_us"] == us["schedule"] + us["launch"]
        per_token = (row["mean_us"]["complete"] + row["mean_us"]["deliver"]) / row["batch"]
        assert row["output_tokens_per_s"] == pytest.approx(1e6 / per_token)
    assert all(run["equal"] for run in result["checks"][0]["runs"])
    assert result["settings"]["tokenizer"].startswith("made up")
    assert "need a GPU" in text


def test_prefill(tmp_path: Path, tiny_config: Path) -> None:
    lengths = ("--input-len", "8,24", "--batch-tokens", "24", "--repeats", "1")
    result, text = bench(tmp_path, "prefill", tiny_config, *lengths)
    assert [(row["batch"], row["input_len"]) for row in result["rows"]] == [(1, 8), (3, 8), (1, 24)]
    for row in result["rows"]:
        tokens = row["batch"] * row["input_len"]
        assert row["prompt_tokens_per_s"] == pytest.approx(tokens / (row["ms"] / 1e3))
    assert all(run["equal"] for check in result["checks"] for run in check["runs"])
    assert "prompt tokens/s" in text


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_startup(tmp_path: Path, tiny_config: Path) -> None:
    small = ("--max-model-len", "64", "--max-running-requests", "2")
    result, _ = bench(tmp_path, "startup", tiny_config, *small, "--rungs", "1,2")
    for name in ("cold", "warm"):
        seconds = dict(result[name]["seconds"])
        total = seconds.pop("total")
        assert sum(seconds.values()) == pytest.approx(total, abs=1e-3)
        assert result[name]["startup_s"]["total"] <= seconds["engine"]
        assert result[name]["graphs"]["decode"]["number"] > 0
    numbers = [(row["kind"], row["rungs"], row["graphs"][row["kind"]]["number"]) for row in result["ladders"]]
    # A CPU captures decode graphs once per bucket of context lengths: here there is one bucket.
    assert numbers == [("decode", 1, 1), ("decode", 2, 2), ("prefill", 1, 1)]


@pytest.mark.parametrize(
    "package", ["rich", pytest.param("torch", marks=pytest.mark.slow)], ids=["a small one", "all"]
)
def test_byte_code_is_kept_where_the_environment_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    if package != "torch":
        monkeypatch.setattr(startup, "_IMPORTED", f"import {package}")
    kept = startup.with_byte_code({**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, str(tmp_path))
    assert "PYTHONDONTWRITEBYTECODE" not in kept
    assert kept["PYTHONPYCACHEPREFIX"] == str(tmp_path)
    assert list(tmp_path.rglob(f"{package}/__init__*.pyc"))
    allowed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    assert startup.with_byte_code(allowed, str(tmp_path)) == allowed


def test_wrong_tokens_are_found(tiny_config: Path) -> None:
    subject = Subject.of({"model": str(tiny_config), "device": "cpu"})
    workload = Workload.uniform(2, 8, 6, 131)
    with subject.start_reference(workload) as llm:
        right = contest.Ours(llm).run(workload).tokens
    found = check.check_tokens(subject, workload, [("right", right)])
    assert found["runs"] == [{"run": "right", "hash": found["hash"], "equal": True}]
    wrong = [right[0], [*right[1][:5], (right[1][5] + 1) % 131]]
    with pytest.raises(BenchError, match="wrong run: the tokens are wrong"):
        check.check_tokens(subject, workload, [("wrong run", wrong)])


def test_missing_tokens_are_found() -> None:
    workload = Workload.uniform(2, 4, 3, 50)
    with pytest.raises(BenchError, match="returned 5 tokens for 2 requests, but 6"):
        contest.checked(Run(1.0, [[1, 2, 3], [1, 2]]), workload, "somebody")


def test_contestants_take_turns() -> None:
    order = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def serves(self, workload: Workload) -> bool:
            return self.name == "a" or len(workload) > 1

        def run(self, workload: Workload) -> Run:
            order.append(f"{self.name}{len(workload)}")
            return Run(1.0, [[0] * length for length in workload.output_lens])

    from contextlib import nullcontext

    starters = [lambda: nullcontext([Recorder("a")]), lambda: nullcontext([Recorder("b")])]
    workloads = [Workload.uniform(1, 2, 2, 9), Workload.uniform(2, 2, 2, 9)]
    serve = lambda contestant, workload: contestant.run(workload)  # noqa: E731
    found = contest.compete(starters, workloads, serve, repeats=2, together=True)
    # The first run of each contestant on each workload is not counted.
    assert order == ["a1", "a1", "a1", "a2", "b2", "a2", "b2", "a2", "b2"]
    assert [{name: len(runs) for name, runs in row.items()} for row in found] == [{"a": 2}, {"a": 2, "b": 2}]
    order.clear()
    contest.compete(starters, workloads[1:], serve, repeats=2, together=False)
    assert order == ["a2"] * 3 + ["b2"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--peer", "nobody"], "unknown peer 'nobody': use transformers, vllm, sglang"),
        (["decode", "--peer", "sglang"], "sglang is not installed here"),
        (["decode", "--output-len", "1"], "output_len must be at least 2"),
        (["decode", "--output-len", "0"], "output_len must be at least 2, not 0"),
        (["throughput", "--scale", "0"], "scale must be above 0, not 0"),
        (["throughput", "--peers-file", "nowhere.json"], r"nowhere\.json is not a file of peers' figures"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str, tiny_config: Path) -> None:
    command = ["bench", *arguments, "--model", str(tiny_config)]
    ran = CliRunner().invoke(app, command)
    assert isinstance(ran.exception, BenchError)
    with pytest.raises(BenchError, match=message):
        raise ran.exception


def test_a_list_that_is_none_is_refused(tiny_config: Path) -> None:
    ran = CliRunner().invoke(app, ["bench", "host", "--model", str(tiny_config), "--batch-sizes", "1,x"])
    assert ran.exit_code == 2
    assert "--batch-sizes" in ran.output


def test_what_cannot_be_written_or_does_not_exist_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in (tmp_path, tmp_path / "file" / "x.json"):
        ran = CliRunner().invoke(app, ["bench", "graphs", "--json", str(file)])
        assert ran.exit_code == 2
        assert str(tmp_path) in "".join(ran.output.split())
    for command in (["bench", "graphs"], ["demo"]):
        ran = CliRunner().invoke(app, [*command, "--device", "abacus"])
        assert "unknown device 'abacus'" in str(ran.exception)


def test_options_that_are_objects_reach_the_server_as_json() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    flags = bench_http._flags({"speculative_config": drafts, "cuda_graph_bs": (1, 2), "enable_lora": False})
    assert flags[:2] == ["--speculative-config", json.dumps(drafts)]
    assert flags[2:] == ["--cuda-graph-bs", "1,2", "--no-enable-lora"]


def test_pictures_without_matplotlib_say_what_to_install(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["bench", "decode", "--model", str(tiny_config), "--png", str(tmp_path / "x.png")]
    ran = CliRunner().invoke(app, command)
    assert isinstance(ran.exception, BenchError)
    assert ".[plots]" in str(ran.exception)


def test_plot_draws_result_files_and_refuses_others(tmp_path: Path, tiny_config: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = CliRunner().invoke(app, ["bench", "decode", "--model", str(tiny_config), "--png", "picture.txt"])
    assert "picture.txt is no picture by its name" in str(ran.exception)
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    ran = CliRunner().invoke(
        app, ["bench", "plot", str(results / "graphs-h200.json"), "--out", str(tmp_path)]
    )
    assert isinstance(ran.exception, BenchError)
    assert "results of 'graphs' cannot be plotted" in str(ran.exception)
    (tmp_path / "x.json").write_text("{}")
    ran = CliRunner().invoke(app, ["bench", "plot", str(tmp_path / "x.json")])
    assert "not the result of a benchmark" in str(ran.exception)
