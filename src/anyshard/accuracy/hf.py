"""The same model in HF transformers: the peer that accuracy is measured beside.

The only module that imports transformers, and after `comm/torch.py` the only one that imports
torch; both come with the extra `verify`. Weights are the checkpoint's own, widened by this
package, so that only arithmetic differs. Nothing is fetched: the configuration is built by hand,
the state is loaded from arrays.

Letters: T tokens, P positions asked for, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.initialization import no_init_weights

from anyshard.accuracy.hf_fields import hf_config
from anyshard.accuracy.local import OpMeter
from anyshard.checkpoint.names import hf_name
from anyshard.config import ModelConfig, RopeDivisors
from anyshard.ops.exact import F32

__all__ = ["Attention", "HfRun", "hf_logits", "hf_model", "torch_threads", "versions"]

Attention = Literal["eager", "sdpa"]

_METERED = "anyshard_metered_sdpa"  # the name under which transformers finds our attention


def versions() -> str:
    """What is compared with, for the manifest."""
    return f"transformers {transformers.__version__}, torch {torch.__version__}, float32, sdpa"


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

    Raises: UserError for a model that transformers has no fields for.
    Held by: test_accuracy.py::test_reference_agrees_with_hf_in_float64, test_accuracy_hf.py.
    """
    read = weights if callable(weights) else weights.__getitem__
    fields = hf_config(config)
    left_out = ("architectures", "rope_theta", "rope_scaling")
    raw: dict[str, Any] = {k: v for k, v in fields.items() if k not in left_out}
    scaling: Any = fields.get("rope_scaling", {"rope_type": "default"})
    raw["rope_parameters"] = {**scaling, "rope_theta": config.rope_theta}
    configuration, model_type = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[config.architecture]
    settings: Any = configuration(**raw, attn_implementation=attention)
    with no_init_weights():
        model: Any = model_type(settings)
    state = {hf_name(name): torch.from_numpy(read(name)) for name in config.tensor_shapes()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set()), missing
    model.tie_weights()
    model = model.to(dtype).eval()
    if isinstance(config.rope_scaling, RopeDivisors):  # no field of a configuration says this
        model.model.rotary_emb.inv_freq /= torch.tensor(config.rope_scaling.divisors)
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


class HfRun:
    """One forward pass over `tokens`; logits are made piece by piece, so that they need not fit.

    With a meter, the pass tells it what every op wrote. Bits are those of the plain pass.
    `progress(layers done, layers in all)` is called after each layer.
    Held by: test_accuracy_hf.py::test_metered_logits_are_those_of_a_plain_forward_pass.
    """

    def __init__(
        self,
        model: Any,
        tokens: Sequence[int],
        *,
        meter: OpMeter | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._model, self._meter, self._progress = model, meter, progress
        self._x_TD: Any = None  # the residual after the last layer
        self._layers_done = 0
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode(), _watching(model, meter, tokens):
            hooks = [layer.register_forward_hook(self._after) for layer in model.model.layers]
            try:
                self._normed_TD = model.model(ids, use_cache=False).last_hidden_state[0]
            finally:
                for hook in hooks:
                    hook.remove()

    def _after(self, module: Any, arguments: Any, out: Any) -> None:
        self._x_TD = _residual(out)
        self._layers_done += 1
        if self._progress is not None:
            self._progress(self._layers_done, len(self._model.model.layers))

    def logits(self, start: int, stop: int) -> F32:
        """Logits [P, V] of positions start:stop."""
        with torch.inference_mode():
            logits_PV: F32 = self._model.lm_head(self._normed_TD[start:stop]).numpy()
        if self._meter is not None:
            self._meter.logits(self._x_TD[start:stop].numpy(), logits_PV)
        return logits_PV


@contextmanager
def _watching(model: Any, meter: OpMeter | None, tokens: Sequence[int]) -> Iterator[None]:
    """Hooks that tell the meter what the layers' modules get and give; gone afterwards."""
    if meter is None:
        yield
        return

    plain = _registry(transformers.AttentionInterface)["sdpa"]

    def attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        rows = (part[0].transpose(0, 1).flatten(1) for part in (query, key, value))
        meter.qkv(module.layer_idx, *(_array(part) for part in rows))
        return plain(module, query, key, value, *rest, **named)

    transformers.AttentionInterface.register(_METERED, attention)
    mask = _registry(transformers.AttentionMaskInterface)["sdpa"]
    transformers.AttentionMaskInterface.register(_METERED, mask)
    before = model.config._attn_implementation
    hooks = [
        model.model.embed_tokens.register_forward_hook(
            lambda module, arguments, out: meter.embed(tokens, _array(out[0]))
        )
    ]
    for index, layer in enumerate(model.model.layers):
        hooks += _layer_hooks(layer, index, meter)
    model.set_attn_implementation(_METERED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


def _registry(kind: Any) -> Any:
    """The names that transformers knows, as a mapping."""
    return kind()


def _layer_hooks(layer: Any, index: int, meter: OpMeter) -> list[Any]:
    """What o_proj, the second norm and down_proj are given, and what the layer gives."""

    def given(tell: Callable[[int, F32], None]) -> Callable[[Any, Any], None]:
        return lambda module, arguments: tell(index, _array(arguments[0][0]))

    return [
        layer.self_attn.o_proj.register_forward_pre_hook(given(meter.attention)),
        layer.post_attention_layernorm.register_forward_pre_hook(given(meter.o_proj)),
        layer.mlp.down_proj.register_forward_pre_hook(given(meter.ffn)),
        layer.register_forward_hook(
            lambda module, arguments, out: meter.down_proj(index, _array(_residual(out)))
        ),
    ]


def _residual(out: Any) -> Any:
    """[T, D] of what a layer gives; older versions of transformers give a tuple."""
    return out[0] if isinstance(out, torch.Tensor) else out[0][0]


def _array(tensor: Any) -> F32:
    array: F32 = np.ascontiguousarray(tensor.numpy())
    return array
