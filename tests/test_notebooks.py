"""The notebooks run from top to bottom, on a tiny target, and do what they say."""

import json
import os
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from hf_carryover import AutoDrafter
from tests.chat import byte_tokenizer
from tests.tiny import random_drafter, tiny_target

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MASK = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    """Folders of a target with its tokenizer and of a drafter, as the notebooks' settings."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), byte_tokenizer()
    target = tiny_target("llama", vocab_size=len(tokenizer), initializer_range=0.06)  # soon says what it said before
    target.generation_config.eos_token_id = [2, *range(20, 30)]  # a random model rarely says the one end token
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    random_drafter(target, mask_token_id=MASK, qk_norm=False).save_pretrained(folder / "drafter")
    return {"TARGET": str(folder / "target"), "DRAFTER": str(folder / "drafter"), "MASK_TOKEN_ID": str(MASK)}


def execute(name: str, folder: Path, asked: dict[str, str], **settings) -> tuple[dict, list[str]]:
    """
    Run a notebook in `folder`, which becomes its `OUTPUT` too.

    Args:
        asked (`dict[str, str]`): Expressions to evaluate at its end.
        settings: Environment variables.

    Returns:
        Their values by the same names, and the MIME types of all outputs.
    """
    notebook = nbformat.read(FOLDER / name, as_version=4)
    values = ", ".join(f"{key!r}: {expression}" for key, expression in asked.items())
    notebook.cells.append(new_code_cell(f"import json\n\nprint(json.dumps({{{values}}}))"))
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OUTPUT": str(folder)}
    client.execute(env={**os.environ, **offline, **{key: str(value) for key, value in settings.items()}})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return json.loads(outputs[-1].text), [mime for output in outputs for mime in output.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_are_valid_and_hold_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


def test_train_a_drafter(pair, tmp_path):
    asked = {
        "same": "measured['same output'].tolist()",
        "rounds": "int(measured['rounds'].sum())",
        "committed": "int(measured['committed'].sum())",
        "first phase": "first_phase['eval_cross_entropy'].tolist()",
        "second phase": "second_phase['eval_tau_after_rejection'].tolist()",
        "tokens": "tokens",
    }
    told, mimes = execute(
        "train_a_drafter.ipynb",
        tmp_path,
        asked,
        **pair,
        ROWS=150,
        NEW_TOKENS=20,
        DRAFT_VOCABULARY=128,
        BLOCK_STEPS=12,
        CARRYOVER_STEPS=4,
        LEARNING_RATE=1e-2,
    )
    assert len(told["same"]) > 0
    assert all(told["same"])
    assert told["committed"] > told["rounds"] > 0
    assert told["first phase"][-1] < told["first phase"][0]
    assert all(1 <= tau <= 8 for tau in told["second phase"])
    assert "image/png" in mimes
    drafter = AutoDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.generation_config.carryover
    assert drafter.carry_embedding.weight.abs().sum() > 0
    assert drafter.d2t.tolist() == told["tokens"]


def test_adapt_with_lora(pair, tmp_path):
    asked = {
        "accepted": "accepted",
        "before": "before['eval_cross_entropy']",
        "after": "after['eval_cross_entropy']",
    }
    told, _ = execute(
        "adapt_with_lora.ipynb", tmp_path, asked, **pair, ROWS=32, NEW_TOKENS=20, STEPS=10, LEARNING_RATE=2e-2
    )
    accepted = told["accepted"]
    assert accepted["trained"] == accepted["reloaded"] == accepted["merged"] != accepted["without adapter"]
    assert sum(map(sum, accepted["trained"])) > 0
    assert told["after"] < 0.9 * told["before"]
    saved = [path.name for path in (tmp_path / "adapter").iterdir()]
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved
    merged, base = (AutoDrafter.from_pretrained(path) for path in (tmp_path / "merged", pair["DRAFTER"]))
    assert not torch.equal(merged.fc.weight, base.fc.weight)
