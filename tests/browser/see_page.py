"""A page in a real browser: what is cut off, what makes it scroll sideways, and what a visitor's moves do.

    python tests/browser/see_page.py results/report.html [--width 420]

Needs chromium: `make test-browser` installs Debian's. Exit code 1 where something is wrong.
"""

import argparse
import html
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

# The page is in a frame of that width: a browser's own window cannot be as narrow as a telephone's.
_FRAME = """<!doctype html><body>
<iframe id="frame" src="page.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="said">nothing was seen</pre><script>
const wrong = [];
frame.onload = async () => {
  const page = frame.contentDocument, width = frame.contentWindow.innerWidth, found = wrong;
  frame.contentWindow.onerror = (message) => { found.push(`a script failed: ${message}`); };
  const wide = () => page.documentElement.scrollWidth;
  const count = (what) => page.querySelectorAll(what).length;
  const look = () => {
    if (wide() > width) found.push(`the page scrolls sideways: ${wide()} of ${width} px`);
    for (const one of page.querySelectorAll('body *')) {
      const at = one.getBoundingClientRect(), box = one.closest('.wide'), words = one.textContent.slice(0, 60);
      const scrolls = box && box !== one && !(width < 600 && box.querySelector('table'));
      if (at.width && (at.right > width + 0.5 || at.left < -0.5) && !scrolls)
        found.push(`cut off: ${one.tagName} ${at.left.toFixed()}..${at.right.toFixed()} ${words}`);
    }
    for (const drawing of page.querySelectorAll('svg')) {
      const view = drawing.viewBox.baseVal, name = drawing.getAttribute('aria-label');
      if (!drawing.getScreenCTM()) continue;
      const pixel = 1 / drawing.getScreenCTM().a;
      for (const word of drawing.querySelectorAll('text')) {
        const at = word.getBBox();
        if (at.width && (at.x < view.x - pixel || at.x + at.width > view.x + view.width + pixel))
          found.push(`cut off in ${name}: ${word.textContent}`);
      }
    }
  };
  look();
  for (const label of page.querySelectorAll('label.wide')) {
    if (!label.offsetWidth) continue;
    label.click();
    if (wide() > width || label.scrollWidth < 600) found.push(`clicked, a picture does not grow in its own box`);
    label.click();
  }
  const asked = frame.contentWindow.performance.getEntriesByType('resource').map((each) => each.name);
  if (asked.length) found.push(`the page asks for ${asked}`);
  const counts = `${count('svg')} pictures with ${count('svg title')} hover texts, ${count('table')} tables`;
  const more = [];
  try { MOVES } catch (error) { found.push(`a move failed: ${error}`); }
  said.textContent = [`seen at ${width} px: ${counts}`, ...more.map((each) => `more: ${each}`), ...found].join('\\n');
};
</script></body>"""


def seen(page: Path, width: int, moves: str = "") -> list[str]:
    """What a browser sees: the width and how much there is, then `more: ` of what moves say, then what is wrong.

    `moves`: JavaScript of a visitor, who has `page`, `look()` (again), and `more` to say something in.
    """
    with TemporaryDirectory() as folder:
        shutil.copy(page, Path(folder) / "page.html")
        (Path(folder) / "frame.html").write_text(_FRAME.replace("WIDTH", str(width)).replace("MOVES", moves))
        handler = partial(_Quiet, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/frame.html"
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
            options += ["--window-size=1400,1000", f"--user-data-dir={folder}/profile"]
            done = subprocess.run(["chromium", *options, address], capture_output=True, text=True, timeout=300)
            server.shutdown()
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    return html.unescape(said[1]).splitlines() if said else [done.stderr[-2000:]]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


def main() -> int:
    """Print what is seen; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("page", type=Path)
    options.add_argument("--width", type=int, default=420)
    given = options.parse_args()
    if shutil.which("chromium") is None:
        print("error: chromium: is not installed: make test-browser installs it", file=sys.stderr)
        return 2
    first, *wrong = seen(given.page, given.width)
    print("\n".join([first, *(wrong or ["nothing is cut off, and the page does not scroll sideways"])]))
    return int(bool(wrong) or not first.startswith("seen at"))


if __name__ == "__main__":
    sys.exit(main())
