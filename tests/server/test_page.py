"""The live page in headless Chromium."""

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server_process import ServerProcess

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = next((found for name in EXECUTABLES if (found := shutil.which(name))), None)
    if executable is None:
        reason = "no Chromium here: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    assert found, text
    return float(found[0])


def test_the_page_shows_the_load_and_chats(server: ServerProcess, browser: Any, tmp_path: Path) -> None:
    # The test's own conditions are evaluated in the page, which its policy would forbid.
    page = browser.new_context(bypass_csp=True, viewport={"width": 1280, "height": 1000}).new_page()
    problems: list[str] = []
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    assert page.goto(server.url + "/").ok
    page.wait_for_function("document.getElementById('state-text').textContent === 'ready'")
    assert page.inner_text("#model") == "scripted"

    generated = server.get("/stats").json()["generation_tokens"]
    body = {"prompt": "page a", "max_tokens": 200, "temperature": 0, "n": 8}
    load = [threading.Thread(target=server.post, args=("/v1/completions", body)) for _ in range(12)]
    for thread in load:
        thread.start()
    page.wait_for_function("parseFloat(document.getElementById('throughput').textContent) > 0")
    page.wait_for_function("/[1-9]/.test(document.getElementById('requests').textContent)")
    page.wait_for_function("parseFloat(document.getElementById('kv').textContent) > 0")
    for thread in load:
        thread.join()
    assert server.get("/stats").json()["generation_tokens"] > generated
    assert number(page.inner_text("#tpot")) > 0
    assert page.locator(".cell").count() >= 4
    heats = page.eval_on_selector_all(".cell .heat", "cells => cells.map(cell => Number(cell.style.opacity))")
    assert max(heats) > 0.5 > min(heats)
    assert page.locator("#memory i").count() >= 4
    engine = server.engine_statistics()
    whole = sum(engine["memory_bytes"].values())
    assert number(page.inner_text("#memory-sum")) == pytest.approx(whole / 2**20, rel=0.01)
    assert re.search(r"\d (µs|ms|s) / [\d.]+ (µs|ms|s)$", page.inner_text("#tpot"))
    assert re.search(r"[1-9]\S* answers in all", page.inner_text("#requests-note"))
    assert re.search(r"[1-9]\S* tokens written", page.inner_text("#throughput-note"))

    page.evaluate(
        """() => { window.pieces = new Set();
        new MutationObserver(() => { const said = document.querySelectorAll('.said.assistant');
          if (said.length) window.pieces.add(said[said.length - 1].textContent); })
        .observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true}); }"""
    )
    server.post("/flush_cache")
    page.fill("#said", "Say hello")
    page.press("#said", "Enter")
    page.wait_for_function("document.querySelector('.said.assistant')?.textContent.startsWith('Hello w')")
    page.wait_for_function("!document.getElementById('send').disabled")
    assert page.evaluate("window.pieces.size") >= 2, "the answer comes in pieces"
    assert problems == []
    shot = os.environ.get("OSTINATO_PAGE_SCREENSHOT")
    page.screenshot(path=shot or str(tmp_path / "page.png"), full_page=True)


@pytest.mark.slow
def test_a_page_that_is_opened_late_shows_what_was_before(server: ServerProcess, browser: Any) -> None:
    server.post("/v1/completions", {"prompt": "page a", "max_tokens": 200, "temperature": 0})
    time.sleep(3.2)  # the load is over, and samples have it
    page = browser.new_page()
    page.goto(server.url + "/")
    page.wait_for_selector("#spark-throughput polyline")
    assert page.inner_text("#throughput").startswith("0")
    points = page.get_attribute("#spark-throughput polyline", "points")
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert len(heights) >= 3
    assert min(heights) < 3 < 38 < max(heights), "up to the top, and down again"


def test_chat_errors_are_shown(server: ServerProcess, browser: Any) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(server.url + "/")
    page.wait_for_selector(".cell")
    page.fill("#said", "x" * 300)
    page.press("#said", "Enter")
    page.wait_for_selector(".said.error")
    assert "at most" in page.inner_text(".said.error")
    assert page.is_enabled("#send")
    assert not any("Content Security Policy" in text for text in said)
