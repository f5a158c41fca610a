"""anyshard as an arm of the benchmark: the engine of the command line, kept warm.

    python arm_anyshard.py TP THREADS [MODEL] [--record] [--quantization none|int8|auto]

Ranks are forked processes, as in production; with --record, every run is recorded. Without
--quantization the arithmetic is f32, whatever the model is stored as.

Answers one JSON line per line of stdin: {"prompt", "num_tokens"} gives {"tokens", "first_s",
"rest_s", "logits_sha256"}: greedy, batch of one, logits handed to the front and hashed as
`anyshard generate` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from typing import Any

os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")  # before NumPy: we fork

from anyshard.checkpoint import open_checkpoint
from anyshard.engine import Engine, EngineOptions, loader, profile_of
from anyshard.launcher import fork_launcher
from anyshard.layout import plan
from anyshard.request import Request
from anyshard.worker import rank_main

CONTEXT = 512


def run(engine: Engine, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Seconds to the first token, and for the others together."""
    start = time.perf_counter()
    request_id = engine.submit(
        Request(prompt=tuple(prompt), max_tokens=num_tokens, want_logits=True)
    )
    tokens: list[int | None] = []
    digest = hashlib.sha256()
    first_s = 0.0
    for event in engine.run():
        if not tokens:
            first_s = time.perf_counter() - start
        tokens.append(event.token)
        digest.update(event.logits.tobytes() if event.logits is not None else b"")
    if engine.options.record:
        engine.digests(request_id, emitted=len(tokens))
    rest_s = time.perf_counter() - start - first_s
    sha256 = digest.hexdigest()
    return {"tokens": tokens, "first_s": first_s, "rest_s": rest_s, "logits_sha256": sha256}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tp", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--quantization", choices=("none", "int8", "auto"), default="none")
    asked = parser.parse_args()
    checkpoint = open_checkpoint(asked.model)
    arithmetic = checkpoint.arithmetic(asked.quantization)
    profile = profile_of(arithmetic)
    load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic=arithmetic)
    group = fork_launcher(load, rank_main)
    try:
        config = checkpoint.config
        layout = plan(config, tp=asked.tp, leaf=profile.leaf)
        group.wait_loaded()
        options = EngineOptions(
            threads=asked.threads,
            max_num_seqs=1,
            max_model_len=CONTEXT,
            record=asked.record,
        )
        cores = len(os.sched_getaffinity(0))
        engine = Engine(group, config, profile, layout, options, cores=cores)
        print(json.dumps({"ready": {"body": engine.body}}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer = run(engine, command["prompt"], command["num_tokens"])
            print(json.dumps(answer), flush=True)
        engine.close()
    finally:
        group.close()


if __name__ == "__main__":
    main()
