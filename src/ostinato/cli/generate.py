"""`ostinato generate` and `ostinato chat`: text to standard output, everything else to standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .dataclass_flags import flags_of, with_flags

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM

ENGINE = flags_of("engine/config.py", "EngineConfig")
SAMPLING = flags_of("engine/sampling_params.py", "SamplingParams")
SAMPLING = tuple(flag for flag in SAMPLING if flag.name != "structured_outputs")
# One --seed, for the request; the engine gets the same (it seeds random weights).
ENGINE = tuple(flag for flag in ENGINE if flag.name != "seed")

DEFAULTS = {"temperature": 0.0, "max_tokens": 256}
"""Where a command differs from `SamplingParams`: one answer, repeatable, and long enough to be one."""


@with_flags(engine=ENGINE, sampling=SAMPLING)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    graph_report: Annotated[bool, typer.Option("--graph-report", help="Show the graphs at the end.")] = False,
    *,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Answer a prompt. Temperature is 0 and max-tokens 256 unless said otherwise."""
    from ostinato.engine.sampling_params import SamplingParams

    params = SamplingParams(**{**DEFAULTS, **sampling})
    with _llm(engine, running=params.n, seed=params.seed) as llm:
        request = _request(llm, prompt, raw)
        if params.n == 1:
            for piece in llm.stream(request, params):
                print(piece, end="", flush=True)
            print(flush=True)
        else:
            for completion in llm.generate(request, params)[0].outputs:
                print(completion.text, flush=True)
        if graph_report:
            print(llm.graph_report(), file=sys.stderr)


@with_flags(engine=ENGINE, sampling=SAMPLING)
def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    *,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it."""
    from ostinato.engine.sampling_params import SamplingParams

    params = SamplingParams(**{**DEFAULTS, **sampling})
    messages = [{"role": "system", "content": system}] if system else []
    with _llm(engine, running=1, seed=params.seed) as llm:
        while said := _ask():
            messages.append({"role": "user", "content": said})
            answer = ""
            for piece in llm.stream(llm.engine.encode_chat(messages), params):
                answer += piece
                print(piece, end="", flush=True)
            print(flush=True)
            messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _llm(engine: Mapping[str, Any], *, running: int, seed: int | None) -> LLM:
    """An engine for as many requests as there are: what never runs need not be captured."""
    from ostinato.engine.llm import LLM

    if engine.get("cuda_graph_debug_log"):
        logging.basicConfig(format="%(message)s")
        logging.getLogger("ostinato.graphs").setLevel(logging.INFO)
    options = {"max_running_requests": running, "seed": seed or 0, **engine}
    print("ostinato: loading and capturing", file=sys.stderr, flush=True)
    llm = LLM(options.pop("model", None), **options)
    report = llm.graph_report()
    print(
        f"ostinato: {len(report.graphs)} graphs, mode {report.mode}, {report.backend} on {report.device}, "
        f"captured in {report.capture_ms / 1000:.1f} s",
        file=sys.stderr,
        flush=True,
    )
    return llm


def _request(llm: LLM, prompt: str, raw: bool) -> Any:
    is_instruct = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if raw or not is_instruct:
        return prompt
    return llm.engine.encode_chat([{"role": "user", "content": prompt}])
