"""Templates in the manner of each family: the text and ids that transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from test_checkpoint_gguf import needs_demo
from test_tokenizer_kinds import demo_metadata, pieces

from anyshard.errors import UserError
from anyshard.tokenizer import ChatTemplate
from anyshard.tokenizer.build import tokenizer_from_gguf

transformers = pytest.importorskip("transformers")

LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
{%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}{%- set system, turns = false, messages %}{%- endif %}
{%- for m in turns %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}
{%- endif %}
{%- set text = m['content'].strip() %}
{%- if loop.index0 == 0 and system is not false %}
{%- set text = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + text %}
{%- endif %}
{%- if m['role'] == 'user' %}{{- bos_token + '[INST] ' + text + ' [/INST]' }}
{%- else %}{{- ' ' + text + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""
LLAMA3 = """
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- '<|head|>system<|/head|>\\n\\nToday is ' + date + '.<|eot|>' }}
{%- for m in messages %}
{{- '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""
CHATML = """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if loop.last and m.role == 'user' %}{%- set mark = ' ' %}{%- else %}{%- set mark = '' %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ mark ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for m in messages[::-1] %}
  {%- set index = messages|length - 1 - loop.index0 %}
  {%- if not ns.seen and m.role == 'user' and m.content is string %}
    {%- set ns.seen, ns.last = true, index %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set content = m.content %}
  {%- if m.role == 'assistant' and '</think>' in content %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {%- if loop.index0 > ns.last %}{% continue %}{% endif %}
  {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if m['role'] in ['user', 'system'] %}{{ '[INST]' + m['content'] + '[/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ m['content'] | trim + eos_token }}
{%- else %}{{ raise_exception('only user and assistant can speak') }}{%- endif %}
{%- endfor %}"""
TINYLLAMA = """{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + eos_token }}
{% else %}
{{ '<|assistant|>\\n'  + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}
{{ m.content }}{% if loop.last %} end{% endif %}
{% endgeneration %}
{% else %}
{{ m | tojson }} {{ {'a': [1, 2.5, none, true]} | tojson(indent=2) }}
{% endif %}{% endfor %}"""
TEMPLATES = {
    "llama 2": LLAMA2,
    "llama 3": LLAMA3,
    "chatml": CHATML,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "tinyllama": TINYLLAMA,
    "generation marks": GENERATION,
}
USER = {"role": "user", "content": '  Hello <b>you</b> & "them",\n日本 🙂 isn\'t it?\n'}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n It is. "}
CHATS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be\nbrief."}, USER],
    "turns": [{"role": "system", "content": "S"}, USER, REPLY, {"role": "user", "content": "And?"}],
    "answered": [USER, REPLY],
}


def hf_text(template: str, messages: list[dict[str, str]], *, prompt: bool) -> str:
    from tokenizers import Tokenizer, models

    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), bos_token="<s>", eos_token="</s>"
    )
    text: str = hf.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
    )
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, chat: str, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], label="m").render(
        CHATS[chat],
        add_generation_prompt=prompt,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert ours == hf_text(TEMPLATES[name], CHATS[chat], prompt=prompt)
    assert ours


@pytest.mark.parametrize("name", ["llama 2", "mistral"])
def test_what_a_template_refuses_is_a_users_mistake(name: str) -> None:
    wrong = [USER, USER] if name == "llama 2" else [USER, {"role": "tool", "content": "x"}]
    with pytest.raises(UserError, match=r"cannot render these messages: (user|only)"):
        ChatTemplate(TEMPLATES[name], label="m").render(
            wrong, add_generation_prompt=True, special_tokens={"bos_token": "", "eos_token": ""}
        )


@needs_demo
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama 2", "mistral", "tinyllama"])
def test_a_chat_has_the_ids_of_transformers(name: str, chat: str) -> None:
    """Byte-level for those whose models are, SentencePiece for the others."""
    spm = name in ("llama 2", "mistral", "tinyllama")
    metadata: dict[str, Any] = pieces() if spm else demo_metadata()
    metadata = metadata | {"tokenizer.chat_template": TEMPLATES[name]}
    ours = tokenizer_from_gguf(metadata, label="m", vocab=49152)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=ours._backend, bos_token="<s>", eos_token="</s>"
    )
    text = hf.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    with ours._lock:
        ours._backend.encode_special_tokens = False
        wanted = ours._backend.encode(text, add_special_tokens=False).ids
        ours._backend.encode_special_tokens = True
    assert ours.encode_chat(CHATS[chat]) == wanted
    assert ours._encode_scaffold(text, {}) == wanted
