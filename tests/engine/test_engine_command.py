"""`ostinato generate` and `ostinato chat`, in this process, with a tiny model."""

import io
import logging
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from ostinato.cli.dataclass_flags import flags_of
from ostinato.cli.generate import NO_FLAGS
from ostinato.cli.interrupting import import_engine
from ostinato.cli.main import app, main
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import TinyModel

SMALL = [
    "--max-model-len",
    "64",
    "--chunked-prefill-size",
    "16",
    "--cuda-graph-prefill-tokens",
    "16",
    "--num-pages",
    "20",
    "--enable-cudagraph-gc",
]

SAMPLING_FIELDS = ("engine/parameters/sampling_params.py", "SamplingParams")


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    options = {"max_model_len": 64, "num_pages": 20, "max_running_requests": 2, "disable_cuda_graph": True}
    with LLM(tiny_text.directory, **options) as llm:
        yield llm


def run(model: TinyModel, *arguments: str, command: str = "generate", said: str | None = None):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(app, [command, *arguments, "--model", model.directory, *SMALL], input=said)


def test_text_goes_to_standard_output_and_the_rest_does_not(tiny_text: TinyModel, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    raw = llm.generate("Hello", params)[0].outputs[0].text
    templated = llm.chat([{"role": "user", "content": "Hello"}], params)[0].outputs[0].text
    result = run(tiny_text, "Hello", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    assert result.stdout == templated + "\n"
    assert "graphs, mode full-and-piecewise" in result.stderr
    result = run(tiny_text, "Hello", "--max-tokens", "9", "--raw", "--enforce-eager", "--graph-report")
    assert result.stdout == raw + "\n"
    assert "disabled" in result.stderr


def test_captures_are_shown_when_asked_for(tiny_text: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    try:
        assert run(tiny_text, "Hello", "--max-tokens", "1").exit_code == 0
        assert "captured GraphRow" not in caplog.text
        assert run(tiny_text, "Hello", "--max-tokens", "1", "--cuda-graph-debug-log").exit_code == 0
        assert "captured GraphRow(mode='full', descriptor='decode 1x1" in caplog.text
    finally:
        logging.getLogger("ostinato.graphs").setLevel(logging.NOTSET)


def test_every_sampling_parameter_is_a_flag(tiny_text: TinyModel, llm: LLM) -> None:
    result = run(
        tiny_text,
        *("Hello", "--raw", "--n", "2", "--seed", "4", "--temperature", "0.9", "--max-tokens", "6"),
        *("--logit-bias", "7=-3.5", "--logit-bias", "8=2", "--stop", "zz", "--stop-token-ids", "3,4"),
        *(
            "--top-p",
            "0.9",
            "--top-k",
            "30",
            "--min-p",
            "0.01",
            "--repetition-penalty",
            "1.1",
            "--ignore-eos",
        ),
    )
    assert result.exit_code == 0, result.output
    params = SamplingParams(
        n=2,
        seed=4,
        temperature=0.9,
        max_tokens=6,
        logit_bias={7: -3.5, 8: 2.0},
        stop=["zz"],
        stop_token_ids=[3, 4],
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.1,
        ignore_eos=True,
    )
    [output] = llm.generate("Hello", params)
    assert result.stdout == "".join(completion.text + "\n" for completion in output.outputs)
    help_text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "300"}).output
    flags = {flag.name: "--" + flag.name.replace("_", "-") for flag in flags_of(*SAMPLING_FIELDS)}
    shown = set(re.findall(r"--[\w-]+", help_text))
    missing = {name for name, flag in flags.items() if flag not in shown}
    # (Logits processors are the engine's: a flag of the same name.)
    assert missing == NO_FLAGS - {"logits_processors"}, (
        "what is not one value, what is about streams, what would not be shown; all else is a flag"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logit-bias", "seven"], "TOKEN_ID=BIAS"),
        (["--cuda-graph-bs", "1,two"], "1,2,4"),
        (["--speculative-config", "{bad"], "'{bad' cannot be parsed (as a JSON object)"),
        (["--no-such-flag", "1"], "No such option"),
        (["--logprobs", "1"], "No such option: --logprobs"),
        (["--no-detokenize"], "No such option: --no-detokenize"),
    ],
)
def test_a_wrong_flag_is_refused(tiny_text: TinyModel, arguments: list[str], message: str) -> None:
    result = run(tiny_text, "Hello", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_no_seed_is_no_error(tiny_text: TinyModel) -> None:
    result = run(tiny_text, "Hello", "--seed", "-1", "--max-tokens", "1", "--enforce-eager")
    assert result.exit_code == 0, result.output


def test_a_chat_remembers(tiny_text: TinyModel, llm: LLM) -> None:
    result = run(tiny_text, "--max-tokens", "5", "--temperature", "0", command="chat", said="Hi\nYou\n\n")
    assert result.exit_code == 0, result.output
    params = SamplingParams(temperature=0, max_tokens=5)
    messages = [{"role": "user", "content": "Hi"}]
    first = llm.chat(messages, params)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "You"}]
    second = llm.chat(messages, params)[0].outputs[0].text
    assert result.stdout == f"{first}\n{second}\n"


def interrupted(pieces: Iterator[str], after: int) -> Iterator[str]:
    """The pieces of an answer, with Ctrl-C before one of them."""
    for number, piece in enumerate(pieces):
        if number == after:
            signal.raise_signal(signal.SIGINT)
        yield piece


def test_ctrl_c_ends_an_answer_and_a_chat_goes_on(
    tiny_text: TinyModel, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    stream, asked = LLM.stream, []

    def stopped_once(self: LLM, prompt: dict[str, list[int]], params: SamplingParams) -> Iterator[str]:
        asked.append(prompt["prompt_token_ids"])
        pieces = stream(self, prompt, params)
        return interrupted(pieces, 2) if len(asked) == 1 else pieces

    monkeypatch.setattr(LLM, "stream", stopped_once)
    flags = ("--max-tokens", "5", "--temperature", "0")
    result = run(tiny_text, *flags, command="chat", said="Hi\nYou\n\n")
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    first, second = result.stdout.splitlines()
    assert second
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    messages += [{"role": "user", "content": "You"}]
    assert asked[1] == llm.engine.prompts.chat(messages)["prompt_token_ids"], "what was said of it is kept"
    asked.clear()
    result = run(tiny_text, "Hello", *flags)
    assert result.exit_code == 130
    assert isinstance(result.exception, SystemExit)
    assert 0 < len(result.stdout) < 5
    assert signal.getsignal(signal.SIGINT) is before


def test_a_chat_forgets_its_first_turns_before_it_runs_out_of_room(tiny_text: TinyModel) -> None:
    said = "".join(f"Tell me number {number}\n" for number in range(6))
    result = run(tiny_text, "--max-tokens", "20", command="chat", said=said)
    assert result.exit_code == 0, result.output
    assert "the conversation is too long: dropped the oldest turns (1)" in result.stderr


def test_a_prompt_comes_from_standard_input(tiny_text: TinyModel, llm: LLM) -> None:
    flags = ("--max-tokens", "5")
    piped = run(tiny_text, "-", *flags, said="Hello\n")
    assert piped.exit_code == 0, piped.output
    expected = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=5))
    assert piped.stdout == expected[0].outputs[0].text + "\n"


def run_with_streams(
    patch: pytest.MonkeyPatch, model: TinyModel, *arguments: str, said: bytes | None
) -> tuple[object, str, str]:
    """Exit code and output of the command with these bytes on standard input, in a terminal for ASCII."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "ascii") for _ in range(2))
    patch.setattr(sys, "argv", ["ostinato", *arguments, "--model", model.directory, *SMALL])
    patch.setattr(sys, "stdin", None if said is None else io.TextIOWrapper(io.BytesIO(said), "ascii"))
    patch.setattr(sys, "stdout", out)
    patch.setattr(sys, "stderr", err)
    patch.setattr(logging.getLogger("ostinato"), "handlers", [])
    with pytest.raises(SystemExit) as ended:
        main()
    told = [stream.buffer.getvalue().decode("ascii") for stream in (out, err)]  # type: ignore[attr-defined]
    return ended.value.code, told[0], told[1]


def test_a_terminal_may_be_unable_to_read_or_show_a_text(
    tiny_text: TinyModel, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-tokens", "9", "--enforce-eager")
    assert run_with_streams(monkeypatch, tiny_text, "generate", "-", *flags, said=None)[2] == (
        "ostinato: - reads the prompt from standard input, which is closed\n"
    )
    assert run_with_streams(monkeypatch, tiny_text, "generate", "\udcff", *flags, said=b"")[2] == (
        "ostinato: what was typed is not text in UTF-8\n"
    )
    params = SamplingParams(temperature=0, max_tokens=9)
    answer = llm.chat([{"role": "user", "content": "Hello"}], params)[0].outputs[0].text
    assert not answer.isascii()
    said = b"\xff\nHello\n"
    code, out, err = run_with_streams(monkeypatch, tiny_text, "chat", "--temperature", "0", *flags, said=said)
    assert (code, out) == (0, answer.encode("ascii", "replace").decode() + "\n"), err
    assert "> ostinato: what was typed is not text in UTF-8\n> > " in err


def test_ctrl_c_ends_a_process_that_is_still_importing(monkeypatch: pytest.MonkeyPatch, ctrl_c: None) -> None:
    """torch swallows an interrupt while it imports NumPy, and goes on with half of it."""
    before, during = signal.getsignal(signal.SIGINT), []

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            during.append(signal.getsignal(signal.SIGINT))
            raise ImportError(name)

    monkeypatch.delitem(sys.modules, "ostinato.engine.llm")
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    with pytest.raises(ImportError, match=r"ostinato\.engine\.llm"):
        import_engine()
    assert during == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before


class Writer:
    """What scripts put in place of a stream: it can write, and nothing else."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), Writer()], ids=["none", "closed", "a writer"])
def test_standard_error_may_be_none_or_anything(
    tiny_text: TinyModel, llm: LLM, stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with LLM(tiny_text.directory, max_model_len=16, num_pages=4, max_running_requests=1) as other:
        assert other.generate(["Hello"], SamplingParams(max_tokens=1))[0].finished


def test_what_is_not_said_is_the_models_own(tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[SamplingParams] = []

    def remembered(self: LLM, prompt: object, params: SamplingParams) -> Iterator[str]:
        used.append(params)
        return iter(())

    monkeypatch.setattr(LLM, "stream", remembered)
    own = ("--override-generation-config", '{"temperature": 0.7, "top_k": 20}')
    assert run(tiny_text, "Hello", *own).exit_code == 0
    assert run(tiny_text, *own, "--top-k", "5", command="chat", said="Hi\n").exit_code == 0
    one, turn = used
    assert (one.temperature, one.top_k, one.max_tokens) == (0.0, 20, 32)
    assert (turn.temperature, turn.top_k, turn.max_tokens) == (0.7, 5, 32)


def test_a_command_line_of_vllm_works(tiny_text: TinyModel) -> None:
    flags = ("--enforce-eager", "--gpu-memory-utilization", "0.5", "--tensor-parallel-size", "1", "--seed=3")
    result = run(tiny_text, "Hello", "--max-tokens", "3", "--graph-report", *flags)
    assert result.exit_code == 0, result.output
    assert "disabled" in result.stderr


def test_what_cannot_be_answered_does_not_end_a_chat(tiny_text: TinyModel) -> None:
    flags = ("--max-tokens", "3", "--temperature", "0")
    result = run(tiny_text, *flags, command="chat", said=f"{'long ' * 40}\nHi\n")
    assert result.exit_code == 0, result.output
    assert "ostinato: " in result.stderr.split("captured in", 1)[1], "the reason is told"
    assert result.stdout == run(tiny_text, "Hi", *flags).stdout


def test_a_long_answer_that_is_asked_for_is_not_cut(
    tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[SamplingParams] = []

    def remembered(self: LLM, prompt: object, params: SamplingParams) -> Iterator[str]:
        used.append(params)
        return iter(())

    monkeypatch.setattr(LLM, "stream", remembered)
    assert run(tiny_text, "Hello", "--max-tokens", "50").exit_code == 0
    assert used[0].max_tokens == 50


def test_wrong_sampling_is_told_before_a_model_is_loaded(tiny_text: TinyModel) -> None:
    result = run(tiny_text, "Hello", "--top-p", "7")
    assert "top_p must be above 0" in str(result.exception)
    assert "loading" not in result.output
