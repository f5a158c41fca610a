"""A traced run as a person, a script or a browser reads it: who waited for what, and the lanes.

Pure: runs in, text out. The page needs nothing from outside it; names in it are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any, Final

import numpy as np

from anyshard.bench.tables import Table
from anyshard.comm.link import emulated_text
from anyshard.fidelity import printable
from anyshard.schedule import SCHEDULES, TimedSlot, idle_share, simulate
from anyshard.trace import KINDS, STREAMS, Pace, RankTrace, Run, bubble, pace, shares, span_ns

__all__ = ["page", "predicted", "run_record", "run_text"]

_MOST_PREDICTED: Final = 4000  # slots


def run_text(run: Run) -> str:
    """A table of the ranks, then what sets the pace, and how much stood idle."""
    start, stop = span_ns(run)
    head = (
        "rank", "stage", "layers", "busy", "upstream", "downstream", "wire", "idle", "hops sent",
        "ledger",
    )  # fmt: skip
    rows = []
    for rank, share in zip(run.ranks, shares(run), strict=True):
        parts = (share.busy, share.upstream, share.downstream, share.wire, share.idle)
        rows.append(
            (
                str(rank.rank),
                str(rank.stage),
                str(run.layers[rank.stage]),
                *(f"{part:.1%}" for part in parts),
                f"{rank.sent[1]} x, {rank.sent[0] / 1e3:.1f} kB",
                "the same"
                if rank.sent == rank.ledger
                else f"{rank.ledger[1]} x, {rank.ledger[0] / 1e3:.1f} kB",
            )
        )
    lines = [
        f"{_title(run)} · {_frames(run)} frames in {(stop - start) * 1e-9:.3f} s",
        Table(head, tuple(rows), frozenset()).plain(),
        _bubble_text(run),
    ]
    found = pace(run)
    lines += [_pace_text(found, run)] if found is not None else []
    lines += [printable(run.note, most=300)] if run.note else []
    lost = sum(rank.lost for rank in run.ranks)
    lines += [f"the first {lost} events are not kept: the run was longer"] if lost else []
    return "\n".join(lines)


def _title(run: Run) -> str:
    return (
        f"{emulated_text(run.links)}{run.name} · {run.schedule}, micro-batches: {run.micro_batches}"
    )


def _frames(run: Run) -> int:
    return len(np.unique(np.concatenate([rank.events["frame"] for rank in run.ranks])))


def _bubble_text(run: Run) -> str:
    schedule = SCHEDULES[run.schedule](len(run.layers), run.micro_batches)
    return (
        f"bubble {bubble(run):.1%} of the ranks' time; slots of equal length, all of them filled, "
        f"would have {float(idle_share(schedule)):.1%}"
    )


def _pace_text(found: Pace, run: Run) -> str:
    text = (
        f"stage {found.stage} sets the pace: {found.stage_s * 1e3:.1f} of "
        f"{found.frame_s * 1e3:.1f} ms a frame"
    )
    if found.layers != run.layers:
        cut = ",".join(map(str, found.layers))
        text += f"; --layers {cut} would give {found.gain:.2f}x where all stages work"
    return text


def run_record(run: Run) -> dict[str, Any]:
    """The same as numbers: shares of 1, seconds, bytes."""
    start, stop = span_ns(run)
    found = pace(run)
    return {
        "name": run.name,
        "schedule": run.schedule,
        "micro_batches": run.micro_batches,
        "layers": run.layers,
        "emulated_links": run.links,
        "note": run.note,
        "frames": _frames(run),
        "seconds": (stop - start) * 1e-9,
        "bubble": bubble(run),
        "pace": None if found is None else asdict(found),
        "ranks": [
            asdict(share)
            | {
                "hop_bytes": rank.sent[0],
                "hop_messages": rank.sent[1],
                "ledger_bytes": rank.ledger[0],
                "ledger_messages": rank.ledger[1],
                "lost_events": rank.lost,
            }
            for rank, share in zip(run.ranks, shares(run), strict=True)
        ],
    }


def predicted(run: Run) -> tuple[TimedSlot, ...]:
    """When the slots of the schedule would run, in seconds, if each took its stage's mean."""
    stages = len(run.layers)
    schedule = SCHEDULES[run.schedule](stages, run.micro_batches)
    times = [_mean_s(next(rank for rank in run.ranks if rank.stage == s)) for s in range(stages)]
    slots = max(1, _frames(run)) * stages
    periods = -(-slots // len(schedule.period))
    if len(schedule.prologue) + periods * len(schedule.period) > _MOST_PREDICTED:
        periods = max(1, _MOST_PREDICTED // len(schedule.period))
    hop, back = max(run.delays_s[:-1], default=0.0), max(run.delays_s[-1:], default=0.0)
    return simulate(schedule, times, periods=periods, hop_time=hop, return_time=back)


def _mean_s(rank: RankTrace) -> float:
    """Mean time that a frame keeps a rank busy."""
    busy = [KINDS.index(kind) for kind in ("compute", "head", "receive", "send")]
    mine = rank.events[np.isin(rank.events["kind"], busy)]
    total: int = sum((mine["stop"] - mine["start"]).tolist())
    return total * 1e-9 / max(1, len(np.unique(mine["frame"])))


def page(runs: Sequence[Run]) -> str:
    """The lanes of every run, to zoom and to point at, the schedule's slots above them."""
    content = json.dumps([_lanes(run) for run in runs], separators=(",", ":"))
    safe = content.replace("<", "\\u003c")
    texts = "".join(f"<pre>{escape(run_text(run))}</pre>" for run in runs)
    return _PAGE.replace("@TEXTS@", texts).replace("@RUNS@", safe)


def _lanes(run: Run) -> dict[str, Any]:
    zero = span_ns(run)[0]
    lanes: list[dict[str, Any]] = []
    slots = predicted(run)
    for stage in range(len(run.layers)):
        mine = [each for each in slots if each.slot.stage == stage]
        lanes.append(
            {
                "name": f"schedule · stage {stage}",
                "spans": [
                    [
                        round(each.start * 1e6, 1),
                        round((each.stop - each.start) * 1e6, 1),
                        len(KINDS),
                        each.slot.round * run.micro_batches + each.slot.micro_batch + 1,
                        each.slot.micro_batch,
                        0,
                    ]
                    for each in mine
                ],
            }
        )
    for rank in run.ranks:
        for lane, kinds in STREAMS.items():
            picked = rank.events[np.isin(rank.events["kind"], [KINDS.index(k) for k in kinds])]
            spans = [
                [(start - zero) / 1e3, (stop - start) / 1e3, kind, frame, rows, num_bytes]
                for start, stop, kind, frame, rows, num_bytes in picked.tolist()
                if stop > zero
            ]
            if spans:
                name = f"rank {rank.rank} · stage {rank.stage} · {lane}"
                lanes.append({"name": name, "spans": spans})
    return {"title": _title(run), "lanes": lanes, "kinds": [*KINDS, "slot"]}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>anyshard: what ranks did when</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #5c636b; --line: #d9dde1;
  --page: #ffffff; --lane: #f3f5f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6e8; --dim: #9aa2aa; --line: #3a4046;
  --page: #15181b; --lane: #1c2024; } }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 110rem; color: var(--ink);
  background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
pre { overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; margin: .4rem 0; }
canvas { display: block; width: 100%; border: 1px solid var(--line); cursor: grab; }
.legend span { display: inline-block; margin-right: 1rem; color: var(--dim); font-size: .87rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
#tip { position: fixed; pointer-events: none; background: var(--page); color: var(--ink);
  border: 1px solid var(--line); padding: .25rem .5rem; font-size: .85rem; display: none;
  white-space: pre; box-shadow: 0 1px 4px #0004; }
.how { color: var(--dim); font-size: .87rem; }
</style></head><body>
<h1>What each rank did when</h1>
<p class="how">Turn the wheel to zoom, drag to move, double-click for all. On top the slots of the
schedule, each as long as its stage takes on average; below what was measured.</p>
@TEXTS@
<p class="legend" id="legend"></p>
<div id="runs"></div><div id="tip"></div>
<script>
const runs = @RUNS@;
const colours = {compute: "#3b78c4", head: "#7a5cc0", upstream: "#e0a43a", wire: "#c9605f",
  receive: "#3f9e8c", downstream: "#b98a5a", send: "#57a65b", idle: "#b8bec4", slot: "#7f97b2"};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const tip = document.getElementById("tip"), LANE = 20, LABEL = 190, AXIS = 22;
for (const [name, colour] of Object.entries(colours)) {
  const entry = document.createElement("span"), box = document.createElement("i");
  box.style.background = colour;
  entry.append(box, name);
  document.getElementById("legend").append(entry);
}
const shown = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) +
  " ms" : us.toFixed(1) + " \\u00b5s";
for (const run of runs) {
  const title = document.createElement("h2"), canvas = document.createElement("canvas");
  title.textContent = run.title;
  document.getElementById("runs").append(title, canvas);
  let end = 1;
  for (const lane of run.lanes) for (const s of lane.spans) end = Math.max(end, s[0] + s[1]);
  let low = 0, high = end;
  const height = AXIS + run.lanes.length * LANE;
  canvas.style.height = height + "px";
  const place = () => ({width: canvas.clientWidth - LABEL});
  function draw() {
    const scale = window.devicePixelRatio || 1, {width} = place();
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    const raw = (high - low) / 8, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(m => m >= raw);
    for (let t = Math.ceil(low / step) * step; t <= high; t += step) {
      const x = LABEL + (t - low) / (high - low) * width;
      g.fillStyle = css("--line");
      g.fillRect(x, AXIS - 4, 1, height);
      g.fillStyle = css("--dim");
      g.fillText(shown(t), x + 3, AXIS / 2);
    }
    run.lanes.forEach((lane, index) => {
      const top = AXIS + index * LANE;
      g.fillStyle = css("--lane");
      if (index % 2) g.fillRect(LABEL, top, width, LANE);
      g.fillStyle = css("--ink");
      g.fillText(lane.name, 2, top + LANE / 2, LABEL - 6);
      for (const [start, length, kind, frame] of lane.spans) {
        if (start > high || start + length < low) continue;
        const from = LABEL + Math.max(0, (start - low) / (high - low) * width);
        const to = LABEL + Math.min(width, (start + length - low) / (high - low) * width);
        g.fillStyle = colours[run.kinds[kind]];
        g.fillRect(from, top + 2, Math.max(.5, to - from - (to - from > 4 ? 1 : 0)), LANE - 4);
        if (to - from > 22) {
          g.fillStyle = "#fff";
          g.fillText(String(frame), from + 3, top + LANE / 2, to - from - 6);
        }
      }
    });
  }
  function at(event) {
    const box = canvas.getBoundingClientRect(), {width} = place();
    return {time: low + (event.clientX - box.left - LABEL) / width * (high - low),
      lane: Math.floor((event.clientY - box.top - AXIS) / LANE)};
  }
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const {time} = at(event), factor = event.deltaY > 0 ? 1.25 : .8;
    low = Math.max(0, time - (time - low) * factor);
    high = Math.min(end, Math.max(low + .5, time + (high - time) * factor));
    draw();
  }, {passive: false});
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = {x: event.clientX, low, high}; });
  window.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held) {
      const width = held.high - held.low;
      low = held.low - (event.clientX - held.x) / place().width * width;
      low = Math.min(Math.max(0, low), Math.max(0, end - width));
      high = low + width;
      draw();
    }
    const {time, lane} = at(event), spans = run.lanes[lane] ? run.lanes[lane].spans : [];
    const found = spans.find(s => s[0] <= time && time <= s[0] + s[1]);
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    const [start, length, kind, frame, rows, bytes] = found;
    const what = run.kinds[kind];
    tip.textContent = what === "slot" ? `slot ${frame}, micro-batch ${rows}\\n${shown(start)}, ` +
      `${shown(length)} long` : `${what}, frame ${frame}, ${rows} rows` + (bytes ? `, ${bytes} ` +
      "bytes" : "") + `\\n${shown(start)}, ${shown(length)} long`;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - 230) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", () => { low = 0; high = end; draw(); });
  window.addEventListener("resize", draw);
  draw();
}
</script></body></html>
"""
