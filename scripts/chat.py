"""Hold the conversation of docs/chat.md in a real terminal, tmux, and put its screen there.

    python scripts/chat.py

Needs tmux. The model's words are the same on every machine; the speeds are this machine's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "chat.md"
BEGIN, END = "```console\n", "```"
SECONDS = 120.0

# (keys, words that must be on the screen before the next keys)
SCRIPT = [
    ("anyshard chat -tp 2", "/help"),
    ("What is the capital of Japan?", "tok/s · first token"),
    ("And of Spain?", "Madrid."),
    ("Tell me a long story about a lighthouse.", "The story of"),
    ("C-c", "stays in the conversation"),
    ("Say thank you in Spanish.", "first token"),
    ("/save talk.json", "saved"),
    ("/rest", "/help lists"),
    ("C-d", "\n$"),
]


class Screen:
    """One shell in a tmux server of its own."""

    def __init__(self, folder: str) -> None:
        self._tmux = ["tmux", "-L", f"anyshard-{os.getpid()}", "-f", os.devnull]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        shell = [
            "env",
            f"PATH={path}",
            "ANYSHARD_CACHE=false",
            "PS1=$ ",
            "bash",
            "--norc",
            "--noprofile",
        ]
        size = ["-x", "100", "-y", "60"]
        self._run("new-session", "-d", *size, "-c", folder, *shell)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], check=True, capture_output=True, text=True, timeout=10
        )
        return done.stdout

    def text(self) -> str:
        """What is on the screen, lines joined where they were only wrapped."""
        return self._run("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def type(self, keys: str) -> None:
        """A line and Return, or one of the keys C-c and C-d."""
        if keys.startswith("C-"):
            self._run("send-keys", keys)
        else:
            self._run("send-keys", "-l", keys)
            self._run("send-keys", "Enter")

    def wait(self, words: str, *, behind: str) -> None:
        """Until `words` have come behind the text that was there before."""
        end = time.monotonic() + SECONDS
        while words not in self.text()[len(behind) :]:
            if time.monotonic() > end:
                raise TimeoutError(f"no {words!r} in\n{self.text()}")
            time.sleep(0.1)

    def close(self) -> None:
        """End the server, and with it all that runs in it."""
        self._run("kill-server")


def conversation() -> str:
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen(folder)
        try:
            screen.wait("$", behind="")
            for keys, words in SCRIPT:
                before = screen.text()
                screen.type(keys)
                screen.wait(words, behind=before)
                time.sleep(0.3)  # the prompt comes after the figures
            return screen.text().removesuffix("$").rstrip()
        finally:
            screen.close()


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(BEGIN) + len(BEGIN)
    stop = text.index(END, start)
    lines = [line.rstrip() for line in conversation().splitlines()]
    PAGE.write_text(text[:start] + "\n".join(lines) + "\n" + text[stop:], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
