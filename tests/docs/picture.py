"""Make the picture of a report's page, ``docs/page.png``: a fused site of a Llama, as planned for an H200. It needs no GPU.

python -m tests.docs.picture
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.engine.test_page import ARGUMENTS, CHROMIUM

PICTURE = Path(__file__).parents[2] / "docs" / "page.png"
EXPLAIN = "-m fx_fusion explain llama --gpu h200 --batch 4 --length 4096 --html"


def main():
    """Explain, choose the first add_rms_norm, and take the picture, in 256 colors: a third of the size."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, *EXPLAIN.split(), str(page)], check=True, stdout=subprocess.DEVNULL)
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        shown = chromium.new_context(viewport={"width": 1280, "height": 960}, device_scale_factor=1.4).new_page()
        shown.goto(f"file://{page}")
        shown.click("#sites button:has-text('add_rms_norm')")
        shown.mouse.move(0, 0)
        picture = shown.screenshot()
        chromium.close()
    few = Image.open(io.BytesIO(picture)).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
