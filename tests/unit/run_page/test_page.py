"""The run page in a browser: Chromium through Playwright, where both are there."""

from __future__ import annotations

import shutil

import pytest

from deepspeed.run_page.server import RunPage
from tests.run_files import steps, write_run
from tests.unit.run_page.test_server import served

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Opens an address and fails on errors of the console and on requests to elsewhere."""
    troubles, contexts = [], []

    def go(address, allowed, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda told: troubles.append(told.text) if told.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith((allowed, "data:")) else troubles.append(asked.url)
        )
        page.goto(address)
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        return page

    yield go
    for context in contexts:
        context.close()
    assert troubles == []


def until(page, expression):
    """Wait for something that becomes true; Playwright's own wait evaluates text, which the page forbids."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} did not become true")


def colored(page, selector):
    """How many points of a canvas are painted."""
    until(page, "!redraw")
    points = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    return page.locator(selector).first.evaluate(f"c => {points}.filter((v, i) => i % 4 === 3 && v).length")


def test_a_live_page_grows_zooms_and_compares(tmp_path, opened):
    write_run(tmp_path, "one", 3000, ranks=9)
    write_run(tmp_path, "two", 2000, seed=3)
    with served(RunPage([tmp_path], {"moments": 1e9})) as server:
        page = opened(server.url, server.url)
        for title in ("Loss", "Throughput", "MFU", "Step time by phase", "Memory of the device", "Sent per step"):
            assert (
                colored(page, f"section:has(h2:text-is('{title}')) canvas, section:has(h2:has-text('{title}')) canvas")
                > 500
            )
        until(page, "document.body.innerText.includes('slowest: rank 7')")
        assert page.evaluate("window.hit") is None, "text of a file is no markup"
        assert "onerror='window.hit=1'" in page.inner_text("#facts")
        with (tmp_path / "one.rank00000.jsonl").open("a") as file:
            file.write('{"kind":"step","step":3001,"loss":1}\n{"kind":"hang","text":"rank 4 is late"}\n')
        until(page, "document.body.innerText.includes('rank 4 is late')")
        assert page.evaluate("limits()") == [1, 3001]
        canvas = page.locator("canvas").first
        canvas.focus()
        page.keyboard.press("+")
        low, high = page.evaluate("limits()")
        assert 1 < low < high < 3001
        page.keyboard.press("0")
        assert page.evaluate("limits()") == [1, 3001]
        page.select_option("#other", "1")
        until(page, "runs[1] && runs[1].columns.step.length === 2000")
        page.keyboard.press("/")
        page.keyboard.type("late")
        assert page.locator("li").count() == 1
        page.fill("#search", "")
        before = page.evaluate("css('--back')")
        page.click("#theme")
        assert page.evaluate("css('--back')") != before


def test_a_file_on_a_phone_has_what_the_run_had(tmp_path, opened):
    write_run(tmp_path, "one", 500, ranks=2)
    target = tmp_path / "page.html"
    target.write_text(RunPage([tmp_path]).static(), encoding="utf-8")
    size = {"width": 390, "height": 844}
    page = opened(target.as_uri(), target.as_uri(), viewport=size, color_scheme="dark", has_touch=True)
    assert colored(page, "canvas") > 500
    wide = (
        "[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > 391).map(e => e.outerHTML)"
    )
    assert page.evaluate(wide) == []
    assert page.evaluate("runs[0].columns.step.length") == len(list(steps(500)))


def test_a_long_run_of_many_ranks_is_drawn(tmp_path, opened):
    write_run(tmp_path, "one", 20_000, ranks=256, tail=8)
    target = tmp_path / "page.html"
    target.write_text(RunPage([tmp_path]).static(), encoding="utf-8")
    page = opened(target.as_uri(), target.as_uri())
    assert page.evaluate("runs[0].columns.step.length") == 20_000
    assert page.evaluate("runs[0].ranks.ranks.length") == 256
    assert colored(page, "canvas") > 500
