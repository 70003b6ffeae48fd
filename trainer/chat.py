"""
Chat templates: from messages to token ids, and which of those the assistant says.

Found by rendering the conversation with and without what the assistant says, so a template needs no `{% generation %}`
tags.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Row = dict[str, list[int]]

ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT calls them
MARK = "MARK{}KRAM"  # stands for what somebody says, while we look where a template puts it


def read_messages(row: Mapping[str, Any]) -> Messages:
    """
    The conversation of a dataset row.

    Args:
        row (`dict`): Has `messages` or `conversations`, whose turns have `role` and `content`, or `from` and `value`.

    Returns:
        `list[dict]`: Turns with `role` and `content`, and whatever else they had.

    Raises:
        `ValueError`: if it has not.
    """
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        raise ValueError(f"A chat row needs `messages` or `conversations`, but this one has {sorted(row)}.")
    messages = []
    for turn in turns:
        # Arrow gives every turn the keys of all turns; those that are None were not there.
        turn = {key: value for key, value in turn.items() if value is not None}
        role = turn.pop("from", None) or turn.get("role")
        content = turn.pop("value", None) or turn.get("content", "" if "tool_calls" in turn else None)
        if role is None or content is None:
            raise ValueError(f"A turn needs `role` and `content`, or `from` and `value`, but this one has {turn}.")
        messages.append({**turn, "role": ROLES.get(role, role), "content": content})
    return messages


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, template: Mapping[str, Any] | None, answer: bool = False
) -> str:
    """
    The conversation as text.

    Args:
        template (`dict`, *optional*): Variables that the chat template reads, e.g. `{"enable_thinking": False}`.
        answer (`bool`): Whether to end with the prompt for the assistant's next answer.

    Raises:
        `ValueError`: if the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no `chat_template`: set one, or pass rows of `input_ids` and `loss_mask`.")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer, **(template or {}))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that a template has rendered, special tokens included."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, template: Mapping[str, Any] | None
) -> list[int]:
    """Token ids of a conversation that waits for the assistant's next answer."""
    return encode(tokenizer, render(tokenizer, messages, template, answer=True))


def user_header(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """
    Returns:
        `tuple[list[int], list[int]]`: What the template writes before a first user message, and the special tokens, if
        any, that it ends that message with.

    Raises:
        `ValueError`: if the template writes nothing before a user message.
    """
    before, _, after = render(tokenizer, [{"role": "user", "content": MARK}], template).partition(MARK)
    if not before.strip():
        raise ValueError("The chat template writes nothing before a user's message, so no question can be sampled.")
    end = _leading_special(tokenizer, after)
    return encode(tokenizer, before), encode(tokenizer, end) if end else []


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    max_length: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> Row:
    """
    A recorded conversation as a row: supervised is what the assistant says and the special token that ends it, but
    neither its header nor an empty think block, nor a tool call. Of a history that the template shortens (earlier
    thinking, say), what it still shows is supervised.

    Args:
        max_length (`int`, *optional*): Tokens to keep. An answer that is cut is supervised as far as it goes.
        template (`dict`, *optional*): Variables that the chat template reads.

    Returns:
        `dict` with `input_ids` and `loss_mask`, two lists of the same length.

    Raises:
        `ValueError`: if the tokenizer cannot say where tokens stand in the text, or the template hides a turn.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no offsets: load the tokenizer with `AutoTokenizer`.")
    text = render(tokenizer, messages, template)
    spans = _answer_spans(tokenizer, messages, text, template)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask, last = [], 0
    for _, end in encoded["offset_mapping"]:
        # From the end of the token before: a byte-level tokenizer leaves whitespace out of a token's own offsets.
        mask.append(int(any(first <= last and end <= stop and first < end for first, stop in spans)))
        last = end
    return {"input_ids": encoded["input_ids"][:max_length], "loss_mask": mask[:max_length]}


def _answer_spans(tokenizer, messages: Messages, text: str, template) -> list[tuple[int, int]]:
    """First and last character + 1 of each assistant message in `text`, with the special token that ends it."""
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant" and message["content"]]
    marked = [dict(message) for message in messages]
    for i in spoken:
        marked[i] = {"role": "assistant", "content": MARK.format(i)}
    between, rest = [], render(tokenizer, marked, template)
    for i in spoken:
        before, found, rest = rest.partition(MARK.format(i))
        if not found:
            raise ValueError(f"The chat template does not show turn {i}: {messages[i]}. Rendered:\n{text}")
        between.append(before)
    between.append(rest)

    spans, cursor = [], 0
    for number, i in enumerate(spoken):
        header, after = between[number], between[number + 1]
        start = cursor + _common(header, text[cursor:])
        if start < cursor + len(header):
            # What the template writes before this answer depends on the answer, as with a think block that is empty or
            # not. The answer then begins where the generation prompt ends.
            start = min(start, cursor + _prompt_end(tokenizer, messages[:i], header, template))
        if number + 1 < len(spoken):
            after = after[: _prompt_start(tokenizer, messages[: spoken[number + 1]], after, template)]
            cursor = text.find(after, start)
        else:
            cursor = len(text) - len(after) if text.endswith(after) else -1
        if cursor < start:
            raise ValueError(f"The chat template changes what follows turn {i}: {messages[i]}. Rendered:\n{text}")
        spans.append((start, cursor + len(_leading_special(tokenizer, after))))
    return spans


def _generation_prompt(tokenizer, history: Messages, template) -> str:
    """What the template writes after `history` to make the assistant speak; empty if that cannot be told."""
    if not history:
        return ""
    closed, waiting = render(tokenizer, history, template), render(tokenizer, history, template, answer=True)
    return waiting.removeprefix(closed) if waiting.startswith(closed) else ""


def _prompt_start(tokenizer, history: Messages, header: str, template) -> int:
    """Where the generation prompt begins in what stands before an answer; its end if it is not there."""
    prompt = _generation_prompt(tokenizer, history, template)
    at = header.rfind(prompt) if prompt else -1
    return len(header) if at < 0 else at


def _prompt_end(tokenizer, history: Messages, header: str, template) -> int:
    prompt = _generation_prompt(tokenizer, history, template)
    start = _prompt_start(tokenizer, history, header, template)
    return start if start == len(header) else start + len(prompt)


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    shortest = min(len(one), len(other))
    return next((i for i in range(shortest) if one[i] != other[i]), shortest)


def _leading_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The special token that `text` begins with, or nothing."""
    return max((token for token in tokenizer.all_special_tokens if text.startswith(token)), key=len, default="")
