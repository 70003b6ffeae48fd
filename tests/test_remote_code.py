"""A saved drafter carries its own code: it loads where this package is not installed, if it is trusted to."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from hf_carryover import AutoDrafter, DSparkDrafter
from tests.tiny import greedy, random_drafter, tiny_prompt, tiny_target

VOCABULARY = 5  # so few that a random drafter is right at times
ELSEWHERE = """
import sys
sys.modules["hf_carryover"] = None  # as if it were not installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

try:
    AutoModel.from_pretrained("drafter", trust_remote_code=False)
except ValueError as refusal:
    print(refusal)
drafter = AutoModel.from_pretrained("drafter", trust_remote_code=True)
asked = load_file("asked.safetensors")
with torch.no_grad():
    context = drafter.fuse(asked["features"], asked["carried"].bool())
    hidden = drafter(asked["embeds"], context, asked["positions"]).last_hidden_state
    head = drafter.borrow(lambda states: states @ asked["head"].T, hidden.device, hidden.dtype)
    logits = drafter.teacher_forced(hidden, drafter.read_out(hidden, head), asked["previous"], None)
save_file({"logits": logits}, "answer.safetensors")
drafter.save_pretrained("again")
"""


@pytest.fixture
def target():
    return tiny_target(vocab_size=VOCABULARY)


@pytest.fixture
def drafter(target):
    return random_drafter(target, drafter_class=DSparkDrafter, markov_rank=4, markov_head_type="gated")


@torch.no_grad()
def ask(drafter: DSparkDrafter) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A block behind four committed and two carried rows, and the logits it gets."""
    slots = drafter.config.block_size
    asked = {
        "features": torch.randn(1, 6, drafter.fc.in_features),
        "carried": torch.tensor([[0, 0, 0, 0, 1, 1]]),
        "embeds": torch.randn(1, slots, drafter.config.hidden_size),
        "positions": torch.tensor([[*range(6), *range(4, 4 + slots)]]),
        "previous": torch.randint(VOCABULARY, (1, slots)),
        "head": torch.randn(VOCABULARY, drafter.config.hidden_size),
    }
    context = drafter.fuse(asked["features"], asked["carried"].bool())
    hidden = drafter(asked["embeds"], context, asked["positions"]).last_hidden_state
    head = drafter.borrow(lambda states: states @ asked["head"].T, hidden.device, hidden.dtype)
    return asked, drafter.teacher_forced(hidden, drafter.read_out(hidden, head), asked["previous"], None)


def test_it_drafts_the_same_where_the_package_is_not_installed(tmp_path, drafter):
    drafter.save_pretrained(tmp_path / "drafter")
    asked, logits = ask(drafter)
    save_file(asked, tmp_path / "asked.safetensors")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "contains custom code" in run.stdout  # what it says without `trust_remote_code`
    assert torch.equal(load_file(tmp_path / "answer.safetensors")["logits"], logits)

    # Saved once more from there, it still is one of ours, and nothing is lost.
    again = AutoDrafter.from_pretrained(tmp_path / "again")
    assert type(again) is DSparkDrafter
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())


def test_with_the_package_installed_its_own_code_runs(tmp_path, drafter):
    drafter.save_pretrained(tmp_path)
    assert "AutoModel" in json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert type(AutoDrafter.from_pretrained(tmp_path, trust_remote_code=True)) is DSparkDrafter


def test_a_drafter_of_remote_code_is_an_assistant_like_any_other(tmp_path, monkeypatch, target, drafter):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    drafter.save_pretrained(tmp_path / "drafter")
    stranger_class = dynamic_module_utils.get_class_from_dynamic_module(
        "modeling_dspark.DSparkDrafter", str(tmp_path / "drafter")
    )
    assert not issubclass(stranger_class, DSparkDrafter)
    stranger = stranger_class.from_pretrained(tmp_path / "drafter")
    prompt = 1 + tiny_prompt() % (VOCABULARY - 2)
    plain = greedy(target, prompt, 40)
    for assistant in (drafter, stranger):
        assert torch.equal(greedy(target, prompt, 40, assistant_model=assistant), plain)
    assert 0 < stranger.stats.accepted < stranger.stats.drafted
    assert stranger.stats.accepted_at == drafter.stats.accepted_at
