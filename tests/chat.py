"""A byte-level tokenizer and small chat templates with the traps that real ones have."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: thinking is dropped from history, and the last answer always shows a think block, be it empty.
THINKING = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}
{{- content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
# Nothing marks the beginning of an answer, content is stripped, and no special token ends it.
BARE = "{% for message in messages %}{{ message.content | trim }}\n{% endfor %}"


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte; offsets leave out whitespace, as those of GPT-2's family do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:3]})
    tokenizer.add_tokens(SPECIAL[3:])
    tokenizer.chat_template = template
    return tokenizer
