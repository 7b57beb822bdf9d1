"""`ostinato generate` and `ostinato chat`: text goes to standard output, all else to standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.graphs.errors import ConfigError

from .dataclass_flags import Flag, flags_of, with_flags
from .interrupting import CtrlC, import_engine
from .model_argument import ModelArgument, with_model
from .typed_text import all_of_standard_input, as_text, line_of_standard_input

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.parameters.sampling_params import SamplingParams

ENGINE = flags_of("engine/config.py", "EngineConfig")
SAMPLING = flags_of("engine/parameters/sampling_params.py", "SamplingParams")
# Fields without a meaning for one text on a terminal, or with values that cannot be typed.
NO_FLAGS = {
    *("structured_outputs", "logits_processors", "extra_args", "output_kind", "stream_interval"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs"),
    *("detokenize", "spaces_between_special_tokens"),
}
SAMPLING = tuple(flag for flag in SAMPLING if flag.name not in NO_FLAGS)
# One --seed, for the request; the engine, which seeds random weights with it, gets the same.
ENGINE = tuple(flag for flag in ENGINE if flag.name != "seed")

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""

ONE_ANSWER = {"temperature": 0.0, "max_tokens": 256}
"""Where `generate` differs from the model's own sampling: repeatable, and long enough for an answer."""

A_TURN = {"max_tokens": 1024}
"""What `chat` uses if the model's files set no limit, so that answers end."""

THE_MODELS = dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"), "the model's own"
)


def _with_defaults(flags: Sequence[Flag], defaults: Mapping[str, Any]) -> tuple[Flag, ...]:
    """The same flags, with the command's defaults in the help where they differ from `SamplingParams`."""
    told = {name: f"[default: {value}]" for name, value in defaults.items()}
    return tuple(
        replace(flag, help=f"{flag.help} {told[flag.name]}") if flag.name in told else flag for flag in flags
    )


OF_GENERATE = _with_defaults(SAMPLING, {**THE_MODELS, **ONE_ANSWER})
OF_CHAT = _with_defaults(
    [flag for flag in SAMPLING if flag.name != "n"], {**THE_MODELS, "max_tokens": "the model's own, or 1024"}
)


@with_flags(engine=ENGINE, sampling=OF_GENERATE)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    graph_report: Annotated[
        bool, typer.Option("--graph-report", help="Print the graph report at the end.")
    ] = False,
    *,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Answer a prompt.

    Unless given, --temperature is 0 and --max-tokens 256; other sampling parameters default to the model's
    own (--generation-config).
    """
    import_engine()
    said = all_of_standard_input().strip() if prompt == "-" else as_text(prompt)
    with _llm(engine, sampling, running=sampling.get("n", 1)) as llm:
        params = _params(llm, sampling, always=ONE_ANSWER)
        request = _request(llm, said, raw)
        with CtrlC() as ctrl_c:
            if params.n == 1:
                _show(llm.stream(request, params), ctrl_c)
            else:
                _show_all(llm, request, params, ctrl_c)
        if graph_report:
            typer.echo(str(llm.graph_report()), err=True)
    if ctrl_c.asked:
        raise typer.Exit(INTERRUPTED)


@with_flags(engine=ENGINE, sampling=OF_CHAT)
def chat(
    model_name: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message at the start of the chat.")] = None,
    *,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> None:
    """Chat with a model. An empty line or Ctrl-D ends the chat, Ctrl-C stops an answer.

    Sampling parameters default to the model's own (--generation-config), and --max-tokens to 1024 if the
    model has no value for it.
    """
    import_engine()
    from ostinato.engine.parameters.sampling_params import RequestError

    first = [{"role": "system", "content": system}] if system else []
    turns: list[dict[str, str]] = []
    with _llm(with_model(engine, model_name), sampling, running=1) as llm:
        params = _params(llm, sampling, otherwise=A_TURN)
        while said := _ask():
            turns.append({"role": "user", "content": said})
            try:
                turns[-1]["content"] = as_text(said)
                _forget_what_does_not_fit(llm, first, turns, params)
                with CtrlC() as ctrl_c:
                    answer = _show(llm.stream(llm.engine.prompts.chat([*first, *turns]), params), ctrl_c)
                turns.append({"role": "assistant", "content": answer})
            except (RequestError, ConfigError) as error:
                _note(str(error))
                turns.pop()


def _params(
    llm: LLM,
    asked: Mapping[str, Any],
    *,
    always: Mapping[str, Any] = MappingProxyType({}),
    otherwise: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """Sampling parameters, by precedence: `asked`, `always` of the command, the model's files, `otherwise`.

    Unless more is asked for, an answer takes at most half of the context."""
    from ostinato.engine.parameters.sampling_params import SamplingParams

    found = {**otherwise, **llm.engine.core.loaded.default_sampling, **always}
    found["max_tokens"] = min(found["max_tokens"], max(1, llm.engine.core.config.max_model_len // 2))
    return SamplingParams(**{**found, **asked})


def _show(pieces: Iterator[str], ctrl_c: CtrlC) -> str:
    """Print the pieces as they come, until the last one or Ctrl-C, and return the text."""
    text = ""
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
        if ctrl_c.asked:
            break
    print(flush=True)
    return text


def _show_all(llm: LLM, request: Any, params: SamplingParams, ctrl_c: CtrlC) -> None:
    """Print several completions when all are finished, or as far as they are at Ctrl-C."""
    from ostinato.engine.parameters.sampling_params import RequestError

    output = llm.engine.add(request, params)
    while not output.finished and not ctrl_c.asked:
        llm.engine.step()
    llm.engine.abort(output.request_id)
    if output.error is not None:
        raise RequestError(output.error)
    for completion in output.outputs:
        print(completion.text, flush=True)


def _ask() -> str:
    """The user's next line; empty at the end of the input and after Ctrl-C."""
    typer.echo("> ", nl=False, err=True)
    try:
        return line_of_standard_input().strip()
    except KeyboardInterrupt:
        typer.echo(err=True)
        return ""


def _forget_what_does_not_fit(
    llm: LLM, first: list[dict[str, str]], turns: list[dict[str, str]], params: SamplingParams
) -> None:
    """Drop the oldest questions with their answers until there is room for another answer."""
    limit = llm.engine.core.config.max_model_len - (params.max_tokens or 1)
    dropped = 0
    while len(turns) > 1 and len(llm.engine.prompts.chat([*first, *turns])["prompt_token_ids"]) > limit:
        del turns[:2]
        dropped += 1
    if dropped:
        _note(f"the conversation is too long: dropped the oldest turns ({dropped})")


def _llm(engine: Mapping[str, Any], sampling: Mapping[str, Any], *, running: int) -> LLM:
    """An engine for exactly this many requests: larger batches need not be captured."""
    from ostinato.engine.llm import LLM
    from ostinato.engine.parameters.sampling_params import SamplingParams

    SamplingParams(**sampling)  # reports invalid values before the model is loaded
    if engine.get("cuda_graph_debug_log"):
        logging.getLogger("ostinato.graphs").setLevel(logging.INFO)
    # An engine's seed is not negative: -1 means no seed.
    options = {"max_running_requests": running, "seed": max(0, sampling.get("seed", 0)), **engine}
    _note("loading the model and capturing graphs")
    llm = LLM(options.pop("model", None), **options)
    report = llm.graph_report()
    _note(
        f"{len(report.graphs)} graphs, mode {report.mode}, {report.backend} on {report.device}, "
        f"captured in {report.capture_ms / 1000:.1f} s"
    )
    return llm


def _note(text: str) -> None:
    typer.echo(f"ostinato: {text}", err=True)


def _request(llm: LLM, prompt: str, raw: bool) -> Any:
    is_instruct = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    if raw or not is_instruct:
        return prompt
    return llm.engine.prompts.chat([{"role": "user", "content": prompt}])
