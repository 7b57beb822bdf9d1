"""What the engine process runs: load, capture, say so, serve."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import zmq

from ostinato.graphs.errors import OstinatoError

from ..forgiving_streams import forgive_full_disks
from ..garbage import spare_long_lived_objects
from ..parent_death import die_with_parent
from ..wire.messages import AdapterInfo, Event, Failed, Loading, Ready, encode
from .heartbeat import Heartbeat

if TYPE_CHECKING:
    from ostinato.engine.core import EngineCore

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Blocked by the parent until they are ignored: none of them finds the process half started."""
LAST_WORDS_SECONDS = 2.0


def run_engine(
    options: Mapping[str, Any],
    command_address: str,
    event_address: str,
    adapters: Sequence[AdapterInfo] | None,
) -> None:
    """The process's main function; `options` are the fields of `EngineConfig`, `adapters` those that an
    engine before had, in place of those of `options`."""
    # Ctrl-C and a stop of the whole process group reach this process too; it leaves when the parent says so.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    forgive_full_disks()
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    context = zmq.Context(io_threads=1)
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    # Steps never wait for the other side: it takes everything in as it comes.
    commands.setsockopt(zmq.RCVHWM, 0)
    events.setsockopt(zmq.SNDHWM, 0)
    commands.connect(command_address)
    events.connect(event_address)
    code = 0
    try:
        heartbeat = Heartbeat(context, event_address)
        _serve(options, adapters, commands, events, heartbeat)
    except BaseException as error:
        if not isinstance(error, OstinatoError):  # ours say what is wrong; of others we want to know where
            logging.getLogger("ostinato.server").exception("the engine gives up")
        events.send(encode(Failed(_in_words(error))))
        code = 1
    commands.close(linger=0)
    events.close(linger=1000)
    if code:
        # What went wrong is still on its way. Whatever else has a socket does not keep the process.
        telling = threading.Thread(target=context.term, daemon=True)
        telling.start()
        telling.join(LAST_WORDS_SECONDS)
    # The end of the process frees everything, and an interpreter with torch in it takes seconds to go.
    os._exit(code)


def _serve(
    options: Mapping[str, Any],
    adapters: Sequence[AdapterInfo] | None,
    commands: zmq.Socket[bytes],
    events: zmq.Socket[bytes],
    heartbeat: Heartbeat,
) -> None:
    def send(event: Event) -> None:
        events.send(encode(event))

    send(Loading("starting the engine"))
    handler = _Forwarder(send)
    logger = logging.getLogger("ostinato")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    from ostinato.engine.llm import LLM

    from .adapters_again import load_again, without_adapters
    from .engine_server import EngineServer

    given = dict(options) if adapters is None else without_adapters(options)
    llm = LLM(given.pop("model", None), **given)
    lost = load_again(llm.engine.core, adapters or ())
    logger.removeHandler(handler)
    server = EngineServer(llm, commands, events, heartbeat)
    server.publish_statistics()
    server.publish_standing()
    spare_long_lived_objects()
    heartbeat.start()
    send(_ready(llm, lost))
    server.serve()


def _ready(llm: Any, lost_adapters: dict[str, str]) -> Ready:
    from ostinato.engine.loading.defaults import preferred_sampling

    from .adapter_controls import adapter_list

    core, report = llm.engine.core, llm.graph_report()
    shape = core.loaded.model.config
    return Ready(
        directory=str(core.loaded.directory),
        tokenizer_directory=str(core.loaded.tokenizer_directory),
        architecture=shape.architecture,
        max_model_len=core.scheduler.max_len,
        max_running=core.config.max_running_requests,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        has_tokenizer=core.loaded.tokenizer is not None,
        can_generate=core.sampler is not None,
        eos_token_ids=sorted(core.loaded.eos_token_ids),
        default_sampling=dict(core.loaded.default_sampling),
        has_logits_processors=bool(core.config.config.logits_processors),
        summary=f"{len(report.graphs)} graphs, mode {report.mode}, {report.backend} on {report.device}, "
        f"captured in {report.capture_ms / 1000:.1f} s",
        can_sleep=core.loaded.memory is not None,
        max_logprobs=core.config.config.max_logprobs,
        adapters=adapter_list(core),
        lost_adapters=lost_adapters,
        vllm_config=_vllm_config(core),
        most_drafts=core.config.max_drafts,
        pooling=core.loaded.pooling,
        preferred_sampling=preferred_sampling(core.config.config),
        num_labels=shape.num_labels,
    )


def _vllm_config(core: EngineCore) -> dict[str, Any]:
    config = core.config.config
    lora = {"max_lora_rank": config.max_lora_rank, "max_loras": config.adapter_slots}
    return {
        "model_config": {
            "model": str(core.loaded.directory),
            "dtype": str(core.config.dtype),
            "max_model_len": core.config.max_model_len,
            "logprobs_mode": config.logprobs_mode,
            "max_logprobs": config.max_logprobs,
            "seed": config.seed,
        },
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "lora_config": None if core.adapters is None else lora,
        # What is said when weights come decides; a server that waits for them needs no flag.
        "weight_transfer_config": {"backend": "nccl"},
    }


class _Forwarder(logging.Handler):
    """What the engine logs while it starts is the progress of the start; of a table, its first line."""

    def __init__(self, send: Any) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if text:
            self._send(Loading(text.splitlines()[0]))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, OstinatoError) else f"{type(error).__name__}: {error}"
