"""A report in a real browser, 420 pixels wide: what is cut off, and what makes the page scroll sideways.

    python tests/workflow/see_report.py results/report.html [--width 420]

Needs chromium, which nothing else here does (Debian: apt-get install chromium). Exit code 1 where something is wrong.
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

# The report is in a frame of that width: a browser's own window cannot be as narrow as a telephone's.
_PAGE = """<!doctype html><body>
<iframe id="frame" src="report.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<pre id="said">nothing was seen</pre><script>
frame.onload = () => {
  const page = frame.contentDocument, width = frame.contentWindow.innerWidth, found = [];
  const wide = () => page.documentElement.scrollWidth;
  if (wide() > width) found.push(`the page scrolls sideways: ${wide()} of ${width} px`);
  for (const one of page.querySelectorAll('body *')) {
    const at = one.getBoundingClientRect(), box = one.closest('.wide');
    if (at.width && (at.right > width + 0.5 || at.left < -0.5) && (!box || box === one))
      found.push(`cut off: ${one.tagName} ${at.left.toFixed()}..${at.right.toFixed()} ${one.textContent.slice(0, 60)}`);
  }
  for (const drawing of page.querySelectorAll('svg')) {
    const view = drawing.viewBox.baseVal, name = drawing.getAttribute('aria-label');
    const pixel = 1 / drawing.getScreenCTM().a;
    for (const word of drawing.querySelectorAll('text')) {
      const at = word.getBBox();
      if (at.width && (at.x < view.x - pixel || at.x + at.width > view.x + view.width + pixel))
        found.push(`cut off in ${name}: ${word.textContent}`);
    }
  }
  for (const label of page.querySelectorAll('label.wide')) {
    label.click();
    if (wide() > width || label.scrollWidth < 600) found.push(`clicked, a picture does not grow in its own box`);
    label.click();
  }
  const count = (what) => page.querySelectorAll(what).length;
  const counts = `${count('svg')} pictures with ${count('svg title')} hover texts, ${count('table')} tables`;
  said.textContent = [`seen at ${width} px: ${counts}`, ...found].join('\\n');
};
</script></body>"""


def seen(report: Path, width: int) -> list[str]:
    """What a browser sees: the width and how much there is, then what is wrong."""
    with TemporaryDirectory() as folder:
        shutil.copy(report, Path(folder) / "report.html")
        (Path(folder) / "frame.html").write_text(_PAGE.replace("WIDTH", str(width)))
        handler = partial(_Quiet, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/frame.html"
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
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
    options.add_argument("report", type=Path)
    options.add_argument("--width", type=int, default=420)
    given = options.parse_args()
    if shutil.which("chromium") is None:
        print("error: chromium: is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    first, *wrong = seen(given.report, given.width)
    print("\n".join([first, *(wrong or ["nothing is cut off, and the page does not scroll sideways"])]))
    return int(bool(wrong) or not first.startswith("seen at"))


if __name__ == "__main__":
    sys.exit(main())
