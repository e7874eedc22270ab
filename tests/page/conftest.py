"""A headless Chromium, spoken to by its DevTools protocol over two pipes: no port, no library.

Without a Chromium the tests that ask for one are skipped; `make test` installs Debian's where it can.
"""

import json
import os
import shutil
import subprocess
from itertools import count
from select import select
from time import monotonic

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60  # for one answer; the first waits for the browser to start


class Browser:
    """One process with one tab. `errors`: what its console and its policy complain of; `requests`: all addresses."""

    def __init__(self, program, profile):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.pipes, self.pending, self.numbers, self.session = (ours_in, ours_out), b"", count(1), None
        self.events, self.errors, self.requests = [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.pipes[1], json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == number)
        assert "error" not in answer, answer
        return answer["result"]

    def _until(self, wanted):
        end = monotonic() + SECONDS
        while True:
            while b"\0" in self.pending:
                message, self.pending = self.pending.split(b"\0", 1)
                found = json.loads(message)
                self._note(found.get("method"), found.get("params", {}))
                if wanted(found):
                    return found
            assert select([self.pipes[0]], [], [], max(end - monotonic(), 0))[0], "the browser does not answer"
            chunk = os.read(self.pipes[0], 1 << 16)
            assert chunk, "the browser has ended"
            self.pending += chunk

    def _note(self, method, parameters):
        if method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(parameters["args"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path, width=1200, scheme="light"):
        """Load a file; returns when its scripts have run."""
        self.errors.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.as_uri())
        self._until(lambda found: found.get("method") == "Page.loadEventFired")

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point(self, script):
        """Move the mouse to the middle of the element that an expression gives, and say where that is."""
        place = self.run(
            f"(() => {{ const e = {script}; e.scrollIntoView({{block: 'center', inline: 'center'}});"
            " const r = e.getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        return place

    def click(self, script):
        """Press the mouse there, as a person would."""
        place = self.point(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)

    def close(self):
        self.process.kill()
        self.process.wait()
        for pipe in self.pipes:
            os.close(pipe)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH; apt-get install chromium")
    opened = Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
