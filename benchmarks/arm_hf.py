"""HF transformers as an arm of the benchmark; run by hf.py in an environment of its own.

    python arm_hf.py DIRECTORY        an HF directory of float32 weights

Answers one JSON line per line of stdin: {"threads", "prompt", "num_tokens"} gives {"tokens",
"first_s", "rest_s"}: greedy, batch of one, KV cache kept, "sdpa" attention, float32.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from typing import Any

import torch
import transformers


class Peer:
    """A loaded model that continues prompts."""

    def __init__(self, directory: str) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # transformers 5 renamed the argument
        known = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def run(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Seconds to the first token, and for the others together."""
        start = time.perf_counter()
        tokens = [0] * num_tokens
        ids, cache = torch.tensor([prompt]), None
        first_s = 0.0
        for index in range(num_tokens):
            kept = {} if cache is None else {self.cache_name: cache}
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **kept)
            cache = out[self.cache_name]
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens[index] = int(ids)
            if index == 0:
                first_s = time.perf_counter() - start
        rest_s = time.perf_counter() - start - first_s
        return {"tokens": tokens, "first_s": first_s, "rest_s": rest_s}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there
    peer = Peer(sys.argv[1])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"ready": versions}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        print(json.dumps(peer.run(asked["prompt"], asked["num_tokens"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
