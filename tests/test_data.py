"""Rows hold what the target has emitted, once, and a stopped run goes on."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat import BARE, byte_tokenizer
from datasets import Dataset
from tiny import tiny_target
from transformers import GenerationConfig

from hf_carryover.trainer import synthesis
from hf_carryover.trainer.data import goes_in_circles, hold_out, is_held_out, load_rows, recorded_text, repeats_itself
from hf_carryover.trainer.synthesis import regenerate, synthesize

TOKENIZER = byte_tokenizer()
CHATS = [[{"role": "user", "content": "ab" * i}, {"role": "assistant", "content": "?"}] for i in range(1, 10)]


@pytest.fixture(scope="module")
def target():
    """Ends often: a random model rarely says the one end token."""
    target = tiny_target("llama", vocab_size=len(TOKENIZER))
    target.generation_config.eos_token_id = [2, *range(20, 40)]
    return target


def rows_of(folder) -> dict[int, dict]:
    rows = [row for file in sorted(folder.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert len({row["row"] for row in rows}) == len(rows), "a row was written twice"
    return {row["row"]: row for row in rows}


def test_regenerated_rows_are_the_targets_own(target, tmp_path):
    folder = regenerate(({"messages": chat} for chat in CHATS), target, TOKENIZER, tmp_path, max_new_tokens=20)
    rows = rows_of(folder)
    assert sorted(rows) == list(range(9))
    for row, chat in enumerate(CHATS):
        prompt = TOKENIZER.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([prompt])
        answer = target.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        assert rows[row]["input_ids"] == prompt + answer
        assert rows[row]["loss_mask"] == [0] * len(prompt) + [1] * len(answer)
        assert rows[row]["sampling"] == "greedy"


def test_regenerate_answers_the_last_user_turn(target, tmp_path):
    turns = ["s", "one", "recorded", "two", "dropped"]
    roles = ["system", "human", "gpt", "human", "gpt"]
    chat = [{"from": role, "value": text} for role, text in zip(roles, turns, strict=True)]
    folder = regenerate([{"conversations": chat}], target, TOKENIZER, tmp_path, max_new_tokens=4)
    row = rows_of(folder)[0]
    prompt = TOKENIZER.decode(row["input_ids"][: row["loss_mask"].index(1)])
    assert prompt.endswith("recorded<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="Row 0 of `dataset` has no user message"):
        regenerate([{"conversations": chat[:1]}], target, TOKENIZER, tmp_path / "other")


def test_long_prompts_are_left_out(target, tmp_path):
    chats = [{"messages": chat} for chat in CHATS]
    folder = regenerate(chats, target, TOKENIZER, tmp_path, max_new_tokens=2, max_prompt_tokens=27)
    assert sorted(rows_of(folder)) == [0, 1, 2, 3]


def test_a_killed_run_goes_on(target, tmp_path, monkeypatch):
    """No row is lost, doubled, or other than it would have been; sampled ones neither."""
    monkeypatch.setattr(synthesis, "ROWS_PER_FILE", 2)
    config = GenerationConfig(do_sample=True, temperature=1.2)
    arguments = {"max_new_tokens": 12, "batch_size": 3, "sampling": config, "seed": 5}
    chats = [{"messages": chat} for chat in CHATS]
    whole = rows_of(regenerate(chats, target, TOKENIZER, tmp_path / "whole", **arguments))

    add = synthesis.RowFolder.add
    made = []

    def killed(self, row):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(row["row"])
        add(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(synthesis.RowFolder, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            regenerate(chats, target, TOKENIZER, tmp_path / "killed", **arguments)
    (tmp_path / "killed" / "part-00002.parquet.partial").write_bytes(b"half a file")
    assert sorted(rows_of(tmp_path / "killed")) == sorted(made[:4])
    assert rows_of(regenerate(chats, target, TOKENIZER, tmp_path / "killed", **arguments)) == whole
    assert rows_of(regenerate(chats, target, TOKENIZER, tmp_path / "killed", **arguments)) == whole

    with pytest.raises(ValueError, match="begun with other settings"):
        regenerate(chats, target, TOKENIZER, tmp_path / "killed", **arguments | {"seed": 6})


def test_slow_rows_are_not_kept_waiting(target, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesis, "SECONDS_PER_FILE", -1)
    folder = regenerate([{"messages": chat} for chat in CHATS[:3]], target, TOKENIZER, tmp_path, max_new_tokens=2)
    assert len(list(folder.glob("part-*.parquet"))) == 3


def test_synthesize(target, tmp_path):
    arguments = {"max_new_tokens": 8, "max_question_tokens": 16, "batch_size": 16, "sampled_share": 0.5}
    folder = synthesize(target, TOKENIZER, 40, tmp_path / "a", **arguments)
    questions, rows = rows_of(folder / "questions"), rows_of(folder)
    assert len(questions) == 40
    usable = {row: question["question"] for row, question in questions.items() if question["question"]}
    assert 5 < len(rows) <= len(usable) < 40
    for number, row in rows.items():
        prompt = [{"role": "user", "content": usable[number]}]
        ids = TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][: row["loss_mask"].index(1)] == ids
        assert sum(row["loss_mask"]) == len(row["input_ids"]) - len(ids)
    assert {row["sampling"] for row in rows.values()} == {"greedy", "temperature 0.7, top_k 50"}
    assert rows_of(synthesize(target, TOKENIZER, 40, tmp_path / "b", **arguments)) == rows
    assert rows_of(synthesize(target, TOKENIZER, 40, tmp_path / "c", **arguments, seed=1)) != rows
    assert json.loads((folder / "settings.json").read_text())["n"] == 40
    with pytest.raises(ValueError, match="no question can be sampled"):
        synthesize(target, byte_tokenizer(BARE), 2, tmp_path / "d", **arguments)


def test_questions_are_distinct():
    questions = {2: "What is  a b?", 0: "What is a?", 1: "", 3: "what is A", 4: "What is a c?", 5: "什么?", 6: "?!"}
    assert synthesis._distinct(questions) == {0: "What is a?", 2: "What is  a b?", 4: "What is a c?", 5: "什么?"}


def test_repeats_itself():
    assert not repeats_itself(list(range(200)))
    assert repeats_itself([*range(30), *[7, 8, 9] * 20])
    assert not repeats_itself([7] * 31), "too short to say"
    # Half of the runs are new: 4 tokens begin 4 of them, the last 3 begin none.
    assert not repeats_itself([*range(33), *range(33)][:64])
    assert repeats_itself([*range(20), *range(20), *range(20)])


def test_goes_in_circles_once_a_whole_window_has_been_said_before():
    new, circle = list(range(100, 300)), [7, 8, 9] * 20
    assert not goes_in_circles(new)
    assert not goes_in_circles([])
    # The first run of the circle that is not new is its fourth; 32 of those are a window.
    assert not goes_in_circles([*new, *circle[: 3 + 3 + 31]])
    assert goes_in_circles([*new, *circle[: 3 + 3 + 32]])
    assert not repeats_itself([*new, *circle]), "most of it is worth learning"
    assert not goes_in_circles([*new, *circle, 1]), "it has found a way out"


def test_every_form_of_rows(tmp_path):
    chat = CHATS[0]
    expected = load_rows([{"messages": chat}], TOKENIZER)[:]
    joined = {"prompt_ids": [1, 2], "response_ids": [3]}
    assert load_rows([joined])[:] == {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 1]]}
    assert load_rows(Dataset.from_list([{"conversations": chat}]), TOKENIZER)[:] == expected
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    assert load_rows(tmp_path / "rows.jsonl", TOKENIZER)[:] == expected
    pq.write_table(pa.Table.from_pylist([joined]), tmp_path / "part-00000.parquet")
    assert load_rows(str(tmp_path))[:] == load_rows([joined])[:]
    both = load_rows([tmp_path, tmp_path / "rows.jsonl"], TOKENIZER)
    assert [sum(mask) for mask in both["loss_mask"]] == [1, 2]
    assert load_rows(both)[:] == both[:]
    assert load_rows(both, max_length=3)[:] == load_rows([joined])[:]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], "needs `messages` or `conversations`"),
        ([{"input_ids": [1, 2], "loss_mask": [1]}], "`loss_mask` of the same length"),
        ([{"input_ids": [1, 2]}], "`loss_mask` of the same length"),
        ([{"messages": [{"role": "user", "content": "hello?"}]}], r"nobody has the role `assistant`.*hello\?"),
        ([{"input_ids": [5, 6], "loss_mask": [0, 0]}], "No token of any row is supervised"),
        ([], "holds no rows"),
        ("nowhere/at.parquet", "is no file and no folder"),
    ],
)
def test_bad_rows(rows, message):
    with pytest.raises(ValueError, match=message):
        load_rows(rows, TOKENIZER)
    with pytest.raises(ValueError, match="`tokenizer` is needed"):
        load_rows([{"messages": CHATS[0]}])
    with pytest.raises(ValueError, match="`split` is 'test'"):
        load_rows([], split="test")


def test_left_out_rows_are_counted(caplog):
    good, loop = {"prompt_ids": [1], "response_ids": [2, 3]}, {"prompt_ids": [1], "response_ids": [2, 3] * 20}
    silent = {"input_ids": [1, 2], "loss_mask": [0, 0]}
    rows = load_rows([good, loop, silent, good, good])
    assert rows[:] == {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]}
    assert "Of 5 rows, 4 are left out: 1 looping, 1 with nothing supervised, 2 repeated." in caplog.text


def test_split_follows_the_prompt():
    rows = [{"prompt_ids": [i], "response_ids": [i, j]} for i in range(400) for j in (1, 2)]
    held_out, train = load_rows(rows, split="held_out"), load_rows(rows, split="train")
    assert len(held_out) + len(train) == len(load_rows(rows)) == 800
    assert [side[:] for side in hold_out(load_rows(rows))] == [train[:], held_out[:]]
    assert 8 <= len(held_out) <= 48
    assert not {row["input_ids"][0] for row in held_out} & {row["input_ids"][0] for row in train}
    # Pinned, so that a drafter is never evaluated on what an older version trained it on.
    assert [i for i in range(100) if is_held_out({"input_ids": [i, 1], "loss_mask": [0, 1]})] == [6, 8, 37]


def test_recorded_text(tmp_path):
    (tmp_path / "text.txt").write_text("abcdé", encoding="utf-8")
    rows = recorded_text(["xy", tmp_path / "text.txt"], TOKENIZER, seq_len=4)
    assert [token for ids in rows["input_ids"] for token in ids] == TOKENIZER("xy<|im_end|>abcdé<|im_end|>")[
        "input_ids"
    ]
    assert rows["loss_mask"][:] == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1]]
    with pytest.raises(ValueError, match="no text"):
        recorded_text([], TOKENIZER, seq_len=4)
    with pytest.raises(ValueError, match="`seq_len` is 1"):
        recorded_text(["xy"], TOKENIZER, seq_len=1)
