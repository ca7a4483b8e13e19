"""Takes the pictures of README.md anew, in some five minutes: `make pictures`, or `python -m tests.pictures [FOLDER]`.

It runs `make demo`, takes a picture of the gateway's live page while requests are under way, and of the report once
that is written. It needs chromium, a Debian package. The exit status is 1 if the demo fails, or if the pictures are
larger than a README should load. The default folder is `.ci/pictures`.
"""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from loadgen.demo.stack import module_command
from tests.browser import Browser

WIDTH = 1400
LIVE_HEIGHT, REPORT_HEIGHT = 1000, 1150
"""Heights of the pictures in pixels: as much of each page as fits a large screen."""
COLOURS = 128
"""The number of colours in a picture. Flat charts and text need no more, and the file has a third of the bytes."""
MOST_BYTES = 400_000
"""The most bytes that both pictures may have together, because every reader of the README loads them."""
LAST_ARM = "predicted_ttft"
DEADLINE_S = 900.0
_WATCH = re.compile(r"watch it live at (http://\S+)")


async def live_page(browser: Browser, url: str) -> bytes:
    """Return a PNG of the page at `url` once it shows prefixes, and decisions of the policy that is compared last."""
    await browser.looks(WIDTH, "light", LIVE_HEIGHT)
    await browser.open(url)
    rows = "[...document.querySelectorAll('#decision-rows tr')]"
    shown = f"{rows}.filter(row => row.textContent.includes('{LAST_ARM}')).length >= 20"
    held = "[...document.querySelectorAll('.prefix')].filter(row => !row.textContent.includes('on no pod')).length >= 6"
    await browser.until(f"{shown} && {held}", DEADLINE_S)
    return await browser.picture()


async def report_page(browser: Browser, url: str) -> bytes:
    """Return a PNG of the top of the report."""
    await browser.looks(WIDTH, "light", REPORT_HEIGHT)
    await browser.open(url)
    return await browser.picture()


def smaller(png: bytes) -> bytes:
    """Return the same picture with few colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    kept = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(kept, "PNG", optimize=True)
    return kept.getvalue()


async def demo_and_pictures(scratch: Path) -> dict[str, bytes]:
    """Return the pictures by file name. Raises RuntimeError if the demo fails."""
    out = scratch / "demo"
    process = await asyncio.create_subprocess_exec(
        *module_command("loadgen", "demo", "--out", str(out)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    watching: asyncio.Task[bytes] | None = None
    try:
        async with Browser.started(scratch / "browser") as browser:
            async for line in process.stdout:
                sys.stdout.write(line.decode(errors="replace"))
                if watching is None and (found := _WATCH.search(line.decode(errors="replace"))):
                    watching = asyncio.create_task(live_page(browser, found[1]))
            if await process.wait() != 0 or watching is None:
                raise RuntimeError(f"the demo ended with status {process.returncode}")
            live = await watching
            report = await report_page(browser, f"file://{out}/report.html")
    finally:
        if watching is not None:
            watching.cancel()
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return {"live.png": smaller(live), "report.png": smaller(report)}


def main(folder: Path) -> int:
    """Take the pictures, and return the exit status."""
    if shutil.which("chromium") is None:
        print("pictures: chromium is not on PATH; on Debian: apt install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="warmroute-pictures-") as scratch:
        try:
            pictures = asyncio.run(demo_and_pictures(Path(scratch)))
        except RuntimeError as error:
            print(f"pictures: {error}", file=sys.stderr)
            return 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        (folder / name).write_bytes(png)
        print(f"{folder / name}: {len(png):,} bytes")
    total = sum(map(len, pictures.values()))
    if total > MOST_BYTES:
        print(f"pictures: {total:,} bytes together, more than {MOST_BYTES:,}: use fewer COLOURS", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".ci/pictures")))
