"""`hf-carryover train` from a recipe to a drafter with its history and card."""

import json
from pathlib import Path

import pytest
import yaml
from peft import PeftModel
from typer.testing import CliRunner

from hf_carryover import AutoDrafter
from hf_carryover.cli import app
from tests.chat import byte_tokenizer
from tests.tiny import greedy, random_drafter, tiny_prompt, tiny_target

MASK = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict:
    """A target with its tokenizer, rows, a text, and what a recipe says about them."""
    folder, tokenizer = tmp_path_factory.mktemp("train"), byte_tokenizer()
    target = tiny_target("llama", vocab_size=len(tokenizer))
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = []
    for seed in range(120):
        ids = greedy(target, tiny_prompt(3, seed), 20)[0].tolist()
        rows.append(json.dumps({"input_ids": ids, "loss_mask": [0] * 3 + [1] * 20}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "text.txt").write_text("Plain text that nobody answered. " * 20)
    return {
        "target": str(folder / "target"),
        "data": [str(folder / "rows.jsonl")],
        "mask_token_id": MASK,
        "num_hidden_layers": 1,
        "block_size": 4,
        "max_length": 64,
        "num_anchors": 8,
        "max_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "learning_rate": "1e-3",  # as YAML reads 1e-3: text
        "eval_generate_prompts": 1,
        "eval_generate_tokens": 4,
        "disable_tqdm": True,
    }


def train(folder: Path, recipe: dict, *flags: str):
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return CliRunner().invoke(app, ["train", str(file), *flags])


def test_a_recipe_and_then_another_make_a_drafter_with_its_history(tmp_path, recipe):
    first = recipe | {"texts": [str(Path(recipe["data"][0]).parent / "text.txt")], "draft_vocab_size": 40}
    outcome = train(tmp_path, first | {"output_dir": str(tmp_path / "first")})
    assert outcome.exit_code == 0, outcome.output
    again = {"drafter": str(tmp_path / "first"), "objectives": ["carryover", "loop"], "max_steps": 50}
    outcome = train(tmp_path, recipe | again, "--output_dir", str(tmp_path / "second"), "--max_steps", "3")
    assert outcome.exit_code == 0, outcome.output

    drafter = AutoDrafter.from_pretrained(tmp_path / "second")
    assert drafter.config.draft_vocab_size == 40
    assert drafter.generation_config.carryover
    assert drafter.generation_config.loop_threshold == -0.5
    runs = json.loads((tmp_path / "second" / "training.json").read_text())
    assert [(run["objectives"], run["steps"], run["data"]) for run in runs] == [
        (["block"], 2, "rows.jsonl and plain text"),
        (["carryover", "loop"], 3, "rows.jsonl"),
    ]
    assert runs[0]["supervised_tokens"] > runs[1]["supervised_tokens"] > 1000
    assert all(run["held_out_tau"] >= 1 for run in runs)
    assert "| 2 | carryover, loop (cross-entropy) | rows.jsonl |" in (tmp_path / "second" / "README.md").read_text()


def test_an_adapter_is_saved_as_one(tmp_path, recipe):
    base = random_drafter(tiny_target("llama", vocab_size=len(byte_tokenizer())), mask_token_id=MASK)
    base.save_pretrained(tmp_path / "base")
    keys = {"drafter": str(tmp_path / "base"), "lora_rank": 2, "output_dir": str(tmp_path / "adapter")}
    outcome = train(tmp_path, recipe | keys | {"objectives": ["carryover", "repair"]})
    assert outcome.exit_code == 0, outcome.output
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    drafter = AutoDrafter.from_pretrained(tmp_path / "base")
    drafter.add_carryover()
    drafter.add_repair()
    adapter = PeftModel.from_pretrained(drafter, tmp_path / "adapter")
    whole = [name for name in adapter.state_dict() if "modules_to_save" in name]
    assert {name.split(".")[2] for name in whole} == {"carry_embedding", "selector"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"mask_token_id": None}, "`mask_token_id` is None: write the id of an unused row"),
    ],
)
def test_a_recipe_that_cannot_be_run_ends_with_one_sentence(tmp_path, recipe, change, told):
    outcome = train(tmp_path, recipe | change | {"output_dir": str(tmp_path / "out")})
    assert outcome.exit_code == 1
    assert told in outcome.stderr
    assert "Traceback" not in outcome.output


def test_a_file_without_arguments_is_told_apart(tmp_path):
    (tmp_path / "recipe.yaml").write_text("just words")
    outcome = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml")])
    assert outcome.exit_code == 1
    assert "holds no arguments: write one a line" in outcome.stderr


def test_a_drafter_goes_on_with_blocks_of_another_size(tmp_path, recipe):
    first = tmp_path / "first"
    assert train(tmp_path, recipe | {"output_dir": str(first)}).exit_code == 0
    change = {"drafter": str(first), "block_size": 3, "output_dir": str(tmp_path / "second")}
    assert train(tmp_path, recipe | change).exit_code == 0
    before, after = (AutoDrafter.from_pretrained(folder) for folder in (first, tmp_path / "second"))
    assert after.config.block_size == 3 != before.config.block_size
    after.add_repair()
    with pytest.raises(ValueError, match="selector was made for 3"):
        after.resize_block(4)
