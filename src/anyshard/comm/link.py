"""Links that are slower than they are: a hop is handed over when a real one would have.

A message that was sent at `sent` is there at max(sent, link free) + bytes / rate + delay, later by
some jitter, and once in a while by a stall; messages never overtake each other. The receiver holds
it back, so the sender goes on at once, and a stage that has nothing else to do waits. On one host
all processes read one clock. What is emulated is said wherever a figure is shown.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from anyshard.errors import OptionError

__all__ = ["EmulatedLink", "LinkSpec", "emulated_text", "parse_link", "parse_links"]

_TIME_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE_BITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(kbit|mbit|gbit)")
_STALL = re.compile(r"(.+)@([0-9]{1,2}(?:\.[0-9]{1,6})?)%")
_BEAT_S: Final = 0.05  # a sign of life so often
_FORM = "a link is a time, 10ms, and if wanted more, 10ms,100mbit,jitter=1ms,stall=200ms@0.1%"


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link. Seconds, and bytes a second; a rate of 0 is no limit.

    jitter_s: each message is late by a random share of it. stall_s, stall_share: and so many of
    them by that much more.
    """

    delay_s: float
    rate_bytes_s: float = 0.0
    jitter_s: float = 0.0
    stall_s: float = 0.0
    stall_share: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.delay_s * 1e3:g} ms"]
        parts += [f"{self.rate_bytes_s * 8e-6:g} Mbit/s"] if self.rate_bytes_s else []
        parts += [f"jitter {self.jitter_s * 1e3:g} ms"] if self.jitter_s else []
        if self.stall_share:
            parts.append(f"stalls of {self.stall_s * 1e3:g} ms in {self.stall_share:.3%}")
        return ", ".join(parts)


class EmulatedLink:
    """The receiver's end of a link. The same messages at the same times fare the same.

    beat: a sign of life, given while a message is held back (comm/liveness.py).
    """

    def __init__(
        self, spec: LinkSpec, *, seed: int, beat: Callable[[], None] = lambda: None
    ) -> None:
        self.spec, self._beat = spec, beat
        self._random = random.Random(seed)
        self._free_s = self._last_s = 0.0

    def due_s(self, sent_s: float, num_bytes: int) -> float:
        """When a message is there; ask once for each, in the order in which they were sent."""
        spec = self.spec
        start = max(sent_s, self._free_s)
        self._free_s = start + (num_bytes / spec.rate_bytes_s if spec.rate_bytes_s else 0.0)
        late = spec.jitter_s * self._random.random()
        late += spec.stall_s if self._random.random() < spec.stall_share else 0.0
        self._last_s = max(self._last_s, self._free_s + spec.delay_s + late)
        return self._last_s

    def hold(self, sent_ns: int, num_bytes: int) -> None:
        """Return when a message is there. sent_ns: of time.monotonic_ns, on this host."""
        due = self.due_s(sent_ns * 1e-9, num_bytes)
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, _BEAT_S))
            self._beat()


def emulated_text(links: Iterable[LinkSpec | str]) -> str:
    """What has to stand before every figure of a run over such links; "" without any."""
    each = [str(link) for link in links]
    if not each:
        return ""
    return f"EMULATED links ({each[0] if len(set(each)) == 1 else '; '.join(each)}) · "


def parse_link(text: str, *, name: str = "--emulate-link") -> LinkSpec:
    """`10ms,100mbit,jitter=1ms,stall=200ms@0.1%`. Raises: OptionError with what is wrong of it."""
    first, *rest = (part.strip() for part in text.split(","))
    found: dict[str, float] = {"delay_s": _seconds(first, name)}
    for part in rest:
        key, _, value = part.partition("=")
        if (rate := _RATE.fullmatch(part)) and "rate_bytes_s" not in found:
            found["rate_bytes_s"] = float(rate[1]) * _RATE_BITS[rate[2]] / 8
            if not found["rate_bytes_s"]:
                raise OptionError(f"{name} has a rate of 0; leave it out for no limit")
        elif key == "jitter" and value and "jitter_s" not in found:
            found["jitter_s"] = _seconds(value, name)
        elif key == "stall" and (stall := _STALL.fullmatch(value)) and "stall_s" not in found:
            found["stall_s"] = _seconds(stall[1], name)
            found["stall_share"] = float(stall[2]) / 100
        else:
            raise OptionError(f"{name} has {part[:40]!r}; {_FORM}")
    return LinkSpec(**found)


def _seconds(text: str, name: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None:
        raise OptionError(f"{name} has {text[:40]!r}, which is no time; {_FORM}")
    return float(found[1]) * _TIME_S[found[2]]


def parse_links(lines: list[str], *, stages: int | None, name: str) -> tuple[LinkSpec, ...]:
    """A link a line: from each stage to the next, then from the last one back to the front.

    stages: None where their number is not known yet.

    Raises: OptionError naming the line, or with both numbers.
    """
    whole = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if stages is not None and len(whole) != stages:
        raise OptionError(
            f"{name} has {len(whole)} links; with -pp {stages} give {stages}, one to each next "
            "stage and one back to the front"
        )
    return tuple(parse_link(line.strip(), name=f"{name} line {number}") for number, line in whole)
