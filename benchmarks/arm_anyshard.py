"""anyshard as an arm of the benchmark: the engine of the command line, kept warm.

    python arm_anyshard.py TP THREADS [MODEL] [--record] [--quantization none|int8|auto] [--rows N]
                           [--kv f32|int8] [--context N]

Ranks are forked processes, as in production; with --record, every run is recorded. Without
--quantization the arithmetic is f32, whatever the model is stored as. --rows: most requests at
once.

Answers one JSON line per line of stdin: {"prompt", "num_tokens"} gives {"tokens", "first_s",
"rest_s", "logits_sha256"}: greedy, batch of one, logits handed to the front and hashed as
`anyshard generate` does. With {"rows"} so many requests of that prompt run in one batch, with
{"logits": false} nobody asks for logits, with {"session"} keys and values stay for the next run of
that session, which goes on where its prompt differs.
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
from anyshard.engine import Engine
from anyshard.epoch import EngineOptions
from anyshard.launcher import fork_launcher
from anyshard.layout import plan
from anyshard.loading import loader, profile_of
from anyshard.request import Request
from anyshard.worker import rank_main

CONTEXT = 512  # tokens of a sequence, by default


def run(
    engine: Engine,
    prompt: list[int],
    num_tokens: int,
    *,
    rows: int,
    logits: bool,
    session: int | None = None,
) -> dict[str, Any]:
    """Seconds to the first token of all `rows` requests, and for the others together."""
    start = time.perf_counter()
    request = Request(
        prompt=tuple(prompt), max_tokens=num_tokens, want_logits=logits, session=session
    )
    ids = [engine.submit(request) for _ in range(rows)]
    tokens: dict[int, list[int | None]] = {request_id: [] for request_id in ids}
    digest = hashlib.sha256()
    first_s = 0.0
    for count, event in enumerate(engine.run(), 1):
        tokens[event.request_id].append(event.token)
        if count == rows:
            first_s = time.perf_counter() - start
            assert all(len(each) == 1 for each in tokens.values()), "prompts ran in several steps"
        digest.update(event.logits.tobytes() if event.logits is not None else b"")
    if engine.options.record:
        for request_id in ids:
            engine.digests(request_id, emitted=num_tokens)
    rest_s = time.perf_counter() - start - first_s
    assert all(each == tokens[ids[0]] for each in tokens.values()), "rows of one batch differ"
    return {
        "tokens": tokens[ids[0]],
        "first_s": first_s,
        "rest_s": rest_s,
        "logits_sha256": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tp", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--quantization", choices=("none", "int8", "auto"), default="none")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--kv", choices=("f32", "int8"), default="f32")
    parser.add_argument("--context", type=int, default=CONTEXT)
    asked = parser.parse_args()
    checkpoint = open_checkpoint(asked.model)
    arithmetic = checkpoint.arithmetic(asked.quantization)
    profile = profile_of(arithmetic, asked.kv)
    load = loader(checkpoint, threads=os.cpu_count() or 1, arithmetic=arithmetic, kv=asked.kv)
    group = fork_launcher(load, rank_main)
    try:
        config = checkpoint.config
        layout = plan(config, tp=asked.tp, leaf=profile.leaf)
        group.wait_loaded()
        options = EngineOptions(
            threads=asked.threads,
            max_num_seqs=asked.rows,
            max_model_len=asked.context,
            record=asked.record,
        )
        cores = len(os.sched_getaffinity(0))
        engine = Engine(group, config, profile, layout, options, cores=cores)
        print(json.dumps({"ready": {"body": engine.body}}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            answer = run(
                engine,
                command["prompt"],
                command["num_tokens"],
                rows=command.get("rows", 1),
                logits=command.get("logits", True),
                session=command.get("session"),
            )
            print(json.dumps(answer), flush=True)
        engine.close()
    finally:
        group.close()


if __name__ == "__main__":
    main()
