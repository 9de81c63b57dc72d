"""Tokenizers of model families that differ in what matters here: how text is cut, where the special
tokens
are kept, what the chat template does. Built in memory."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medserl_agentloop.paths import resource
from medserl_agentloop.testing import tiny_tokenizer

# What Qwen3's own template does with these messages: a system message first, the reasoning of
# earlier answers left out, and with enable_thinking=False an empty <think> block in the generation
# prompt.
QWEN3 = (
    "{%- for m in messages %}"
    "{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- "
    "'<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# Templates of models that always think end the generation prompt with an opened <think>.
ALWAYS_THINKS = QWEN3.partition("{%- if enable_thinking")[0] + "{{- '<think>\\n' }}{%- endif %}"

# Gemma's: no system message, the assistant is called model, contents are trimmed.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
    "\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_TOKENS = (
    *("<|endoftext|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
# Mistral's: brackets, and a system message only as part of a user's.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% "
    "endfor %}"
)


def _finished(
    backend: Tokenizer, special: dict[str, str], markers: list[str], template: str
) -> Any:
    for text in special.values():
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece(template: str, markers: list[str]) -> Any:
    """Blanks as ▁ and bytes for unknown characters, as Llama 2, Gemma and Mistral have it.

    As in those, the special tokens are in the vocabulary itself, here with the merges that lead to
    them: the worst case, in which no pre-tokenizer keeps text from becoming one.
    """
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    merges = [
        *(("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">")),
        *(("▁", "t"), ("h", "e"), ("▁t", "he")),
    ]
    in_bytes, ascii_ = [f"<0x{byte:02X}>" for byte in range(256)], map(chr, range(33, 127))
    pieces = [*special.values(), *in_bytes, "▁", *ascii_, *map("".join, merges)]
    vocabulary = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Replace(" ", "▁")
    decoded = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(decoded)
    return _finished(backend, special, markers, template)


def qwen3(template: str = QWEN3) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


FAMILIES: dict[str, Any] = {
    "qwen3": qwen3(),
    "llama3": tiny_tokenizer(LLAMA3, LLAMA3_TOKENS),
    "tiny_player": AutoTokenizer.from_pretrained(resource("assets/tiny_player")),
    "gemma": sentencepiece(GEMMA, ["<start_of_turn>", "<end_of_turn>", "\n\n"]),
    "mistral": sentencepiece(MISTRAL, ["[INST]", "[/INST]"]),
}
WITHOUT_SYSTEM = {"gemma", "mistral"}
