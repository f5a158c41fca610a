"""The models that bugs are shown on: the adversarial ones, variants of them, and SmolLM2.

A variant exists where a bug needs what `adversarial-9-3` lacks: tied embeddings, norms of q and k,
blocks of Q8_0 or Q4_1, logits that are all negative, quotients that are halves. " int8" at the end
of a name: in that arithmetic.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf_models import write_gguf_model
from grid import Loaded, arithmetic_of, shape_of, the_model
from models import ADVERSARIAL_9_3, MODELS, QWEN3_SHAPED, write_hf_model
from test_stored import shaped

from anyshard.checkpoint import open_checkpoint
from anyshard.ops import KernelChoice
from anyshard.tokenizer import open_tokenizer
from anyshard.verify.cells import PROMPT_TOKENS
from anyshard.verify.driver import served
from anyshard.verify.prompt import hashed_tokens, text_tokens

A9, A14, DEMO = "adversarial-9-3", "adversarial-14-2", "demo"
TIED, NEGATIVE, NORMS = "tied-9-3", "negative-9-3", "qwen3-shaped"
BLOCKS, AFFINE, HALVES = "q8_0-5", "q4_1-5", "halves-9-3"
SHIFT = 1000.0  # below zero, for every logit of NEGATIVE


def push_below_zero(weights: dict[str, Any]) -> None:
    """Lane 0 of the residual is 1 for every token, and the head takes SHIFT times its norm off."""
    weights["embed"][:, 0] = 1
    for name, weight in weights.items():
        if name.rsplit(".", 1)[-1] in ("o", "o_bias", "down", "down_bias"):
            weight[0] = 0
    weights["head"][:, 0] = -SHIFT


def give_halves(weights: dict[str, Any]) -> None:
    """In layer 0 all values are 127 and halves, whatever the token.

    Attention gives them back, some to a rounding. Where 127 is exact a block of int8 has the scale
    1, so quotients of o_proj are halves: of 92,736 in a cell 2,262, and to 1,242 it matters.
    """
    bias = weights["layers.0.v_bias"].reshape(-1, ADVERSARIAL_9_3.head_dim)
    bias[:] = np.arange(-8, 8) + np.float32(0.5)
    bias[:, 0] = 127
    weights["layers.0.v"][:] = 0


@cache
def subject(name: str) -> Loaded:
    """A model by name, loaded once in a process."""
    shape = shape_of(name)
    return the_model(name) if shape == DEMO or shape in MODELS else packed(name)


def packed(name: str, *, kernels: KernelChoice = "auto") -> Loaded:
    """A model by name, its weights widened and packed by that body."""
    shape, arithmetic = shape_of(name), arithmetic_of(name)
    if shape == DEMO:
        checkpoint = open_checkpoint(None)
        prompt = text_tokens(open_tokenizer(checkpoint), PROMPT_TOKENS)
        return Loaded.of(name, served(checkpoint, kernels=kernels, arithmetic=arithmetic), prompt)
    with tempfile.TemporaryDirectory() as folder:
        path = _written(shape, Path(folder))
        loaded = served(open_checkpoint(str(path)), kernels=kernels, arithmetic=arithmetic)
    return Loaded.of(name, loaded, hashed_tokens(70, loaded.config.vocab, seed=5))


def _written(name: str, folder: Path) -> Path:
    write = partial(write_hf_model, folder, seed=11, adversarial=True)
    match name:
        case "tied-9-3":
            return write(config=replace(ADVERSARIAL_9_3, tied=True))
        case "negative-9-3":
            return write(config=ADVERSARIAL_9_3, change=push_below_zero)
        case "halves-9-3":
            return write(config=ADVERSARIAL_9_3, change=give_halves)
        case "qwen3-shaped":
            return write(config=QWEN3_SHAPED)
        case "q8_0-5" | "q4_1-5":
            kind = name.removesuffix("-5").upper()
            write_gguf_model(folder / "m.gguf", shaped(32), kind=kind, seed=3)
            return folder / "m.gguf"
    return write(config=MODELS[name])
