"""A real browser that a test drives: keys, clicks and scripts in one page, by the DevTools protocol over two pipes.

Methods and events: https://chromedevtools.github.io/devtools-protocol (Page, Runtime, Input, Emulation, Browser).
"""

import json
import os
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40, "ArrowUp": 38, "Backspace": 8}
LOOK = """(() => {
  const found = [], width = innerWidth, page = document;
  if (page.documentElement.scrollWidth > width) found.push(`scrolls sideways: ${page.documentElement.scrollWidth}`);
  for (const one of page.querySelectorAll('main *')) {
    const at = one.getBoundingClientRect(), box = one.closest('.wide');
    if (at.width && (at.right > width + 0.5 || at.left < -0.5) && !(box && box !== one))
      found.push(`cut off: ${one.tagName} ${at.left.toFixed()}..${at.right.toFixed()} ${one.textContent.slice(0, 50)}`);
  }
  for (const drawing of page.querySelectorAll('svg')) {
    if (!drawing.getBoundingClientRect().width) continue;
    const scale = drawing.getScreenCTM().a, view = drawing.viewBox.baseVal;
    for (const word of drawing.querySelectorAll('text')) {
      const at = word.getBBox(), size = parseFloat(getComputedStyle(word).fontSize) * scale;
      if (size < 10) found.push(`${size.toFixed(1)} px: ${word.textContent}`);
      if (at.width && (at.x < view.x - 1 || at.x + at.width > view.x + view.width + 1))
        found.push(`cut off in ${drawing.getAttribute('aria-label')}: ${word.textContent}`);
    }
  }
  return found;
})()"""
"""What is cut off, makes the page scroll sideways, or has text of less than 10 pixels."""


class Tab:
    """A page of the browser."""

    def __init__(self, folder: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "about:blank"]
        fixed = f"exec chromium {' '.join(options)} 3<&{to_read} 4>&{to_write}"
        self.browser = subprocess.Popen(
            ["bash", "-c", fixed], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._left, self._session = 0, b"", ""
        self.downloads = folder / "downloads"
        (target,) = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        given = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.call("Browser.setDownloadBehavior", **given)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                self._left += os.read(self._from, 1 << 20)
            line, _, self._left = self._left.partition(b"\0")
            said = json.loads(line)
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said.get("result", {})

    def open(self, address: str, width: int, *, dark: bool = False) -> None:
        """Open a page as wide as a screen, light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState == 'complete' && location.href != 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, condition: str, limit_s: float = 120.0) -> None:
        """Wait until an expression of the page is true."""
        end = monotonic() + limit_s
        while not self.run(condition):
            assert monotonic() < end, f"{condition} is not so: {self.run('document.body.innerText')[:3000]}"
            sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        given = {
            "key": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": 8 * shift,
            "code": key.strip() or "Space",
        }
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page, for people."""
        self.call("Page.enable")
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self.call("Browser.close")
        self.browser.wait(30)
        os.close(self._to)
        os.close(self._from)


@contextmanager
def a_tab() -> Iterator[Tab]:
    """A browser with one empty page."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tab = Tab(Path(folder))
        try:
            yield tab
        finally:
            tab.close()
