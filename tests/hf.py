"""The same model in HF transformers: the peer that accuracy is measured beside.

Weights are the checkpoint's own, widened by this package, so that only arithmetic differs.
Nothing is fetched: the configuration is built by hand, the state is loaded from arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from models import hf_config
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.initialization import no_init_weights

from anyshard.checkpoint.names import hf_name
from anyshard.config import ModelConfig

F32 = NDArray[np.float32]

Attention = Literal["eager", "sdpa"]


def hf_model(
    config: ModelConfig,
    weights: Mapping[str, F32] | Callable[[str], F32],
    *,
    dtype: torch.dtype = torch.float32,
    attention: Attention = "sdpa",
) -> Any:
    """HF's Llama, Qwen2 or Qwen3 with these weights (by canonical name).

    `dtype` is that of weights and products; RMSNorm, RoPE and (eager) softmax are computed in
    float32 whatever it is. `attention` "sdpa" is what transformers takes by default.
    """
    read = weights if callable(weights) else weights.__getitem__
    left_out = ("architectures", "rope_theta", "rope_scaling")
    raw = {k: v for k, v in hf_config(config).items() if k not in left_out}
    scaling: Any = hf_config(config).get("rope_scaling", {"rope_type": "default"})
    raw["rope_parameters"] = {**scaling, "rope_theta": config.rope_theta}
    configuration, model_type = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[config.architecture]
    settings = configuration(**raw, attn_implementation=attention)
    with no_init_weights():
        model = model_type(settings)
    state = {hf_name(name): torch.from_numpy(read(name)) for name in config.tensor_shapes()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set()), missing
    model.tie_weights()
    model = model.to(dtype).eval()
    head, embed = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head.data_ptr() == embed.data_ptr()) == config.tied
    return model


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch on `count` threads, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hf_logits(
    model: Any, tokens: Sequence[int], *, positions: Sequence[int] | None = None
) -> NDArray[Any]:
    """Logits [P, V] at `positions` (all if None), one forward pass without a cache."""
    keep: Any = 0 if positions is None else torch.tensor(list(positions))
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=keep)
    logits: NDArray[Any] = out.logits[0].numpy()
    return logits
