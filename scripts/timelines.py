"""The pictures of docs/trace.md: traced runs, as `anyshard trace --html` shows them in a browser.

    python scripts/timelines.py [--browser chromium]

Eight prompts through two stages with emulated hops of 10 ms, one after the other and as four
micro-batches. Needs the demo model and a Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PICTURES: Final = ROOT / "docs" / "pictures"
PROMPTS: Final = (
    "The sea", "A mountain", "The old clock", "Rain on a roof", "A letter", "The harbour", "Snow",
    "An empty train",
)  # fmt: skip
SPLIT: Final = ("--layers", "19,11", "--threads", "1", "--emulate-link", "10ms", "-n", "12")
#: Name of the picture, flags, prompts at once, height in pixels.
RUNS: Final = {
    "one_after_the_other": (("--max-num-seqs", "1"), 640),
    "four_micro_batches": (("--micro-batches", "4"), 640),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    PICTURES.mkdir(exist_ok=True)
    anyshard = [sys.executable, "-m", "anyshard.cli"]
    prompts = [part for text in PROMPTS for part in ("-p", text)]
    with tempfile.TemporaryDirectory() as folder:
        for name, (flags, height) in RUNS.items():
            trace, page = Path(folder, f"{name}.json.gz"), Path(folder, f"{name}.html")
            run = [*anyshard, "generate", *prompts, *SPLIT, "--ignore-eos", *flags]
            subprocess.run([*run, "--trace", str(trace)], check=True, capture_output=True)
            shown = [*anyshard, "trace", str(trace), "--html", str(page)]
            text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
            print(f"{name}\n{text}")
            picture = PICTURES / f"{name}.png"
            flags_ = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            size = f"--window-size=1200,{height}"
            command = [browser, *flags_, size, f"--screenshot={picture}", page.as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=60)


if __name__ == "__main__":
    main()
