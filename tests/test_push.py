"""`push_to_hub` uploads everything that loading needs, with or without this package installed."""

from pathlib import Path
from types import SimpleNamespace

import torch
from huggingface_hub import ModelCard
from transformers.utils import hub

from hf_carryover import AutoDrafter
from tests.tiny import random_drafter, tiny_target


def test_what_is_pushed_loads_as_the_same_drafter(tmp_path, monkeypatch):
    class Hub:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id, operations, **kwargs):
            for operation in operations:
                (tmp_path / operation.path_in_repo).write_bytes(Path(operation.path_or_fileobj).read_bytes())

    monkeypatch.setattr(hub, "hf_api", Hub)
    monkeypatch.setattr(
        hub, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("---\nlicense: mit\n---\n# A drafter")
    )
    drafter = random_drafter(tiny_target())
    drafter.push_to_hub("someone/drafter")

    assert "# A drafter" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "modeling_dflash.py").exists()
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.generation_config.carryover is True
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
