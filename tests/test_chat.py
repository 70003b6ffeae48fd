"""The loss mask is 1 exactly on what the assistant says."""

import pytest
from chat import BARE, CHATML, THINKING, byte_tokenizer

from hf_carryover.trainer.chat import prompt_ids, read_messages, tokenize_chat, user_header


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 4, contents, strict=False)]


def supervised(tokenizer, row) -> list[str]:
    """The supervised stretches of a row, as text."""
    runs, last = [], 0
    for token, bit in zip(row["input_ids"], row["loss_mask"], strict=True):
        if bit:
            runs[len(runs) - 1 + (not last) :] = [[*(runs[-1] if last else []), token]]
        last = bit
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "contents", "expected"),
    [
        pytest.param(CHATML, ["Hi", "Yo"], ["Yo<|im_end|>"], id="one answer"),
        pytest.param(
            CHATML, ["Hi", "Yo", "2?", " b\n"], ["Yo<|im_end|>", " b\n<|im_end|>"], id="two, with whitespace"
        ),
        pytest.param(CHATML, ["Hi", "Hi", "Hi", "Hi"], ["Hi<|im_end|>"] * 2, id="answer says what the user says"),
        pytest.param(CHATML, ["Hi", "né 🌱\n\n-"], ["né 🌱\n\n-<|im_end|>"], id="many bytes a letter"),
        pytest.param(CHATML, ["Hi", "", "So?", "a"], ["a<|im_end|>"], id="empty answer"),
        pytest.param(BARE, ["Hi", "Yo"], ["Yo"], id="no header and no end token"),
        pytest.param(BARE, ["", " Yo "], ["Yo"], id="stripped"),
        pytest.param(THINKING, ["Hi", "Yo"], ["Yo<|im_end|>"], id="empty think block is the template's"),
        pytest.param(
            THINKING,
            ["Hi", "<think>\nhm\n</think>\n\nYo"],
            ["<think>\nhm\n</think>\n\nYo<|im_end|>"],
            id="thinking is the target's",
        ),
        pytest.param(
            THINKING,
            ["Hi", "<think>\nhm\n</think>\n\nYo", "2?", "<think>\neh\n</think>\n\nb"],
            ["Yo<|im_end|>", "<think>\neh\n</think>\n\nb<|im_end|>"],
            id="thinking dropped from history",
        ),
    ],
)
def test_supervised_is_what_the_assistant_says(template, contents, expected):
    tokenizer = byte_tokenizer(template)
    row = tokenize_chat(tokenizer, chat(*contents))
    assert supervised(tokenizer, row) == expected
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(chat(*contents), tokenize=False)


def test_mask_by_hand():
    row = tokenize_chat(byte_tokenizer(), chat("a", "b"))
    # <|im_start|> u s e r \n a <|im_end|> \n <|im_start|> a s s i s t a n t \n, then b <|im_end|>, then \n
    assert row["loss_mask"] == [0] * 9 + [0] * 11 + [1, 1] + [0]


def test_an_answer_may_begin_the_conversation():
    tokenizer = byte_tokenizer(BARE)
    row = tokenize_chat(tokenizer, [{"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Hi"}])
    assert row["loss_mask"] == [1, 1, 0, 0, 0, 0]


def test_generation_prompt_with_an_empty_think_block():
    tokenizer, off = byte_tokenizer(THINKING), {"enable_thinking": False}
    row = tokenize_chat(tokenizer, chat("Hi", "Yo"), template=off)
    prompt = prompt_ids(tokenizer, chat("Hi"), off)
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["loss_mask"].index(1) == len(prompt)


def test_cut_answer_stays_supervised():
    tokenizer = byte_tokenizer()
    whole = tokenize_chat(tokenizer, chat("Hi", "a long answer"))
    cut = tokenize_chat(tokenizer, chat("Hi", "a long answer"), max_length=25)
    assert cut == {name: values[:25] for name, values in whole.items()}
    assert supervised(tokenizer, cut) == ["a lo"]


def test_template_that_hides_a_turn():
    tokenizer = byte_tokenizer("{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="does not show turn 1"):
        tokenize_chat(tokenizer, chat("Hi", "Yo", "2?", "b"))
    with pytest.raises(ValueError, match="no `chat_template`"):
        tokenize_chat(byte_tokenizer(None), chat("Hi", "Yo"))


def test_every_form_of_conversation():
    expected = chat("Hi", "Yo")
    share_gpt = [{"from": "human", "value": "Hi", "role": None}, {"from": "gpt", "value": "Yo", "role": None}]
    assert read_messages({"messages": expected}) == expected
    assert read_messages({"conversations": expected}) == expected
    assert read_messages({"messages": None, "conversations": share_gpt}) == expected
    with pytest.raises(ValueError, match=r"\['text'\]"):
        read_messages({"text": "Hi"})
    with pytest.raises(ValueError, match="needs `role` and `content`"):
        read_messages({"messages": [{"role": "user"}]})


def test_user_header():
    tokenizer = byte_tokenizer()
    header, end = user_header(tokenizer, None)
    assert tokenizer.decode(header) == "<|im_start|>user\n"
    assert tokenizer.decode(end) == "<|im_end|>"
    with pytest.raises(ValueError, match="no question can be sampled"):
        user_header(byte_tokenizer(BARE), None)
