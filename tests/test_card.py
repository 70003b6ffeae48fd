"""A model card says what was measured and how the drafter was trained."""

import json

from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_carryover.cli import app
from tests.tiny import random_drafter, tiny_target

RUN = {
    "objectives": ["block"],
    "loss_type": "distillation",
    "data": "rows",
    "supervised_tokens": 123456,
    "steps": 40,
    "sequences_per_step": 2,
    "learning_rate": 0.0006,
    "seconds": 1800,
    "held_out_tau": 1.234,
    "machine": "cpu, 2 x86_64 cores",
}


def suite(name: str, speed: bool = True, **taus: float) -> dict:
    ways = [{"name": "plain generate", "estimates": {}}]
    for way, tau in taus.items():
        estimate = {"value": tau, "low": tau - 0.1, "high": tau + 0.1}
        told = {"acceptance_length": estimate, "full_block_rate": estimate} | ({"speedup": estimate} if speed else {})
        ways.append({"name": way, "counts": [{}] * 3, "estimates": told})
    return {"name": name, "source": f"hub/{name}", "ways": ways}


def test_a_card_tells_what_was_measured_and_trained(tmp_path):
    folder = tmp_path / "tiny-drafter"
    random_drafter(tiny_target("qwen3")).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps([RUN, RUN | {"objectives": ["carryover"], "held_out_tau": None}]))
    suites = [suite("chat", drafter=1.5, off=1.25), suite("rows", drafter=2.0, off=1.75)]
    facts = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "max_new_tokens": 64}
    (tmp_path / "tau.json").write_text(
        json.dumps({**facts, "suites": suites, "mean": suite("mean", drafter=1.75, off=1.5)})
    )
    (tmp_path / "notes.md").write_text("Trained on a Sunday.")
    command = ["card", str(folder), "org/target", "--evaluation", str(tmp_path / "tau.json")]
    outcome = CliRunner().invoke(app, [*command, "--notes", str(tmp_path / "notes.md")])
    assert outcome.exit_code == 0, outcome.output

    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "org/target"
    assert {"speculative-decoding", "dflash", "carryover"} <= set(card.data.tags)
    assert [(result.dataset_name, result.metric_value) for result in card.data.eval_results] == [
        ("MT-Bench", 1.5),
        ("held-out", 2.0),
    ]
    assert "| MT-Bench, 3 | 1.50 (1.40–1.60) | 1.25 (1.15–1.35) | 1.50 (1.40–1.60) |" in card.text
    assert "| mean, 3 | 1.75 (1.65–1.85) | 1.50 (1.40–1.60) | 1.75 (1.65–1.85) |" in card.text
    assert "| 1 | block (distillation) | rows | 123,456 | 40 | 2 | 0.0006 | 0.50 | 1.23 |" in card.text
    assert "| 2 | carryover (distillation) | rows | 123,456 | 40 | 2 | 0.0006 | 0.50 |  |" in card.text
    assert "1.00 hours in all, on cpu, 2 x86_64 cores." in card.text
    assert card.text.rstrip().endswith("Trained on a Sunday.")


def test_a_card_without_plain_generate_says_nothing_of_speed(tmp_path):
    random_drafter(tiny_target("qwen3")).save_pretrained(tmp_path / "drafter")
    facts = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "max_new_tokens": 64}
    (tmp_path / "tau.json").write_text(json.dumps({**facts, "suites": [suite("math", speed=False, drafter=1.5)]}))
    command = ["card", str(tmp_path / "drafter"), "org/target", "--evaluation", str(tmp_path / "tau.json")]
    assert CliRunner().invoke(app, command).exit_code == 0
    text = (tmp_path / "drafter" / "README.md").read_text()
    assert "| prompts | τ, drafter |\n|---|---|\n| GSM8K, 3 | 1.50 (1.40–1.60) |\n" in text
    assert "Speedup" not in text


def test_a_card_without_measurements_has_no_empty_sections(tmp_path):
    random_drafter(tiny_target("qwen3")).save_pretrained(tmp_path / "drafter")
    assert CliRunner().invoke(app, ["card", str(tmp_path / "drafter"), "org/target"]).exit_code == 0
    text = (tmp_path / "drafter" / "README.md").read_text()
    assert "## What to expect" not in text
    assert "## Training" not in text
    assert 'AutoDrafter.from_pretrained("drafter")' in text
