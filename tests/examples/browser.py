"""A headless Chromium, spoken to over a pair of pipes: opens a page, runs scripts in it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 60.0
# Puts the pipes where the browser looks for them; first out of each other's way.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in a browser of its own. The protocol is Chrome's DevTools: JSON, each message ended by a NUL."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._last_id = 0
        self._buffer = b""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]

    def open(self, url: str) -> None:
        self._ask("Page.navigate", {"url": url}, self._session)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", asked, self._session)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.run(condition):
            assert time.monotonic() < deadline, f"still not {condition}:\n{self.run('document.body?.innerText')}"
            time.sleep(0.05)

    def close(self) -> None:
        self._requests.close()
        self._answers.close()

    def _ask(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._requests.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = self._answers.read(1 << 16)
            assert read, "the browser has gone"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    """A browser that is gone afterwards. It reads from its descriptor 3 and writes to 4."""
    its_requests, our_requests = os.pipe()
    our_answers, its_answers = os.pipe()
    flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command = [program, *flags, "--no-first-run", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(its_requests), str(its_answers), *command],
        pass_fds=(its_requests, its_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(its_requests)
    os.close(its_answers)
    browser: Browser | None = None
    try:
        browser = Browser(our_requests, our_answers)
        yield browser
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        if browser is not None:
            browser.close()
