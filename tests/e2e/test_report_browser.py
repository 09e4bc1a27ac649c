"""Checks the report in a real browser, over the DevTools protocol on a pipe: no port, no driver."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time

import pytest

from support import sample_records
from support.feed_rows import write_feed

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_SECONDS = 150.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-pipe",
)

# Labels that overlap each other, or that stick out of their picture, as laid out by the browser.
CLASHES = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll("figure svg")) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll("text")].map(
      text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push("out: " + text);
      if (box.top < frame.top - 1 || box.bottom > frame.bottom + 1) found.push("out: " + text);
      for (const [other, there] of boxes.slice(index + 1))
        if (box.left < there.right - 1 && there.left < box.right - 1 &&
            box.top < there.bottom - 3 && there.top < box.bottom - 3)
          found.push(text + " / " + other);
    });
  }
  return found;
})()"""


class Browser:
    """Runs a browser with one page, and keeps everything it says in `events`."""

    def __init__(self, program, folder):
        # 3 and 4 are where the browser reads commands and writes answers.
        reader, self._to = _high_pipe()
        self._from, writer = _high_pipe()
        self._folder = folder
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            start_new_session=True,
            preexec_fn=lambda: (os.dup2(reader, 3), os.dup2(writer, 4), None)[-1],
        )
        os.close(reader)
        os.close(writer)
        self.events = []
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Log", "Runtime", "Page"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        # Asked to close, it ends its own children; closing its command pipe asks, too.
        os.write(self._to, b'{"id": 0, "method": "Browser.close"}\0')
        os.close(self._to)
        try:
            self._process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=DEADLINE_SECONDS)
        os.close(self._from)

    def call(self, method, **params):
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            message = self._next(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def open(self, path, *, width=1200, scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next(deadline))

    def named(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def requested(self):
        sent = self.named("Network.requestWillBeSent")
        return [request["request"]["url"] for request in sent]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def _next(self, deadline):
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0.0, left))
            assert ready, f"the browser said nothing for {DEADLINE_SECONDS:g} s"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, f"the browser ended, code {self._process.poll()}"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


def _high_pipe():
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")
    with Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    before, after = sample_records.write_timelines(folder)
    timelines = {"before_timeline": before, "after_timeline": after}
    none = dict.fromkeys(("decision", "training", "evaluation"))
    pages = {
        "whole": {**timelines, "log_files": [folder / "logs" / "dnn-algo-1.log"]},
        "broken": {**none, "environment": {}, "failure": "error: the catalog has no type local.c9"},
        "fed": {**timelines, "feed_file": write_feed(folder, hosts=3)},
        "gpus": {**timelines, **sample_records.with_gpus(folder)},
    }
    for name, records in pages.items():
        (folder / name).mkdir()
        sample_records.write_page(folder / name, **records)
    return {name: folder / name / "report.html" for name in pages}


pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")]
)
@pytest.mark.parametrize("name", ["whole", "broken", "fed", "gpus"])
def test_report_opens_with_no_console_message_and_fetches_nothing(
    browser, reports, name, scheme, ground
):
    browser.open(reports[name], scheme=scheme)
    asked = [url for url in browser.requested() if not url.startswith("data:")]
    assert asked == [reports[name].as_uri()]
    for event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        assert browser.named(event) == []
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_the_check_for_fetches_sees_one(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<!doctype html><title>x</title><img alt="" src="missing.png">')
    browser.open(page)
    assert (tmp_path / "missing.png").as_uri() in browser.requested()


@pytest.mark.parametrize("width", [1200, 760, 420])
@pytest.mark.parametrize("name", ["whole", "broken", "fed", "gpus"])
def test_page_is_not_wider_than_its_window_and_labels_do_not_clash(browser, reports, name, width):
    browser.open(reports[name], width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(CLASHES) == []


def test_one_drawing_of_each_pair_is_shown(browser, reports):
    shown = "[...document.querySelectorAll('figure svg')].filter(e => e.clientWidth).length"
    figures = "document.querySelectorAll('figure').length"
    for width in (1200, 420):
        browser.open(reports["whole"], width=width)
        assert browser.evaluate(shown) == browser.evaluate(figures) == 2


def test_pictures_are_named_and_described_for_screen_readers(browser, reports):
    browser.open(reports["whole"])
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    names = [node["name"]["value"] for node in nodes if node["role"].get("value") == "image"]
    assert len(names) == 2
    assert "Before: today's cluster" in names[0]
