import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors import safe_open

from hf_carryover import AutoDrafter, CarryoverTrainer, CarryoverTrainingArguments, DominoDrafter, DSparkDrafter
from hf_carryover.trainer.guest import GuestTarget
from hf_carryover.trainer.initialise import initialise_from_target, most_frequent_tokens
from hf_carryover.trainer.losses import dspark_loss, leading_run, position_weights
from tests.tiny import greedy, random_drafter, tiny_prompt, tiny_target

ROWS = 24


@cache
def rows(count: int = ROWS, prompt: int = 3, answer: int = 20) -> list[dict]:
    """What the target really says."""
    target, made = tiny_target("qwen3"), []
    for seed in range(count):
        ids = greedy(target, tiny_prompt(prompt, seed), answer)[0].tolist()
        made.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * answer})
    return made


def arguments(folder, **changes) -> CarryoverTrainingArguments:
    settings = {
        "num_anchors": 8,
        "max_length": 23,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "eval_generate_prompts": 2,
        "eval_generate_tokens": 8,
    }
    return CarryoverTrainingArguments(output_dir=str(folder), **{**settings, **changes})


def trainer(folder, data=None, drafter_config=None, **changes) -> CarryoverTrainer:
    peft_config = changes.pop("peft_config", None)
    data = data or rows()
    target = tiny_target("qwen3")
    drafter = random_drafter(target, **(drafter_config or {}))  # seeds what an adapter is initialised with, too
    return CarryoverTrainer(
        model=drafter,
        target_model=target,
        args=arguments(folder, **changes),
        train_dataset=data,
        eval_dataset=data[:4],
        peft_config=peft_config,
    )


def weights(of: CarryoverTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.model.state_dict().items()}


def assert_same_weights(one: dict, other: dict, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance)


@pytest.mark.parametrize(
    "objectives", [["block"], ["carryover"], ["block", "carryover"], ["loop"], ["carryover", "loop"]]
)
def test_training_lowers_the_loss_and_leaves_the_target_alone(tmp_path, objectives):
    learner = trainer(tmp_path, objectives=objectives, max_steps=25, learning_rate=5e-3)
    before = {name: value.clone() for name, value in learner.target_model.state_dict().items()}
    learner.train()
    losses = [entry["loss"] for entry in learner.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert_same_weights(before, learner.target_model.state_dict(), atol=0, rtol=0)
    assert not any(p.requires_grad for p in learner.target_model.parameters())


def test_a_dspark_drafter_learns_from_the_targets_distribution(tmp_path):
    heads = {
        "drafter_class": DSparkDrafter,
        "markov_rank": 8,
        "confidence_head": True,
        "confidence_head_with_markov": True,
        "anchor_predicts": True,
        "draft_vocab_size": 60,
    }
    learner = trainer(
        tmp_path,
        drafter_config=heads,
        objectives=["carryover"],
        loss_type="dspark",
        verify_against="target",
        max_steps=25,
        learning_rate=5e-3,
    )
    before = weights(learner)
    learner.train()
    losses = [entry["loss"] for entry in learner.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(not value.equal(before[name]) for name, value in weights(learner).items() if name != "d2t")


def test_a_curriculum_goes_from_the_body_to_the_corrected_logits(tmp_path):
    heads = {"drafter_class": DominoDrafter, "gru_hidden_size": 8, "correction_rank": 6}
    learner = trainer(tmp_path, drafter_config=heads, loss_type="curriculum", max_steps=25, learning_rate=5e-3)
    shares = []
    read = learner.draft_loss._read
    learner.draft_loss._read = lambda *args: (shares.append(learner.draft_loss.base_share), read(*args))[1]
    before = weights(learner)
    learner.train()
    assert shares == pytest.approx([1 - step / 25 for step in range(25)])
    unchanged = {name for name, value in weights(learner).items() if value.equal(before[name])}
    assert unchanged == {"carry_embedding.weight"}
    losses = [entry["loss"] for entry in learner.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_four_batches_of_two_are_two_batches_of_four(tmp_path):
    outcomes = []
    for size, steps in ((2, 2), (4, 1)):
        learner = trainer(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps, objectives=["carryover"]
        )
        learner.train()
        outcomes.append(weights(learner))
    assert_same_weights(*outcomes, atol=1e-5, rtol=1e-4)


def test_four_steps_and_four_more_after_a_resume_are_eight_steps(tmp_path):
    straight = trainer(tmp_path / "straight", max_steps=8, save_strategy="no")
    straight.train()
    first = trainer(tmp_path / "resumed", max_steps=8, save_strategy="steps", save_steps=4)
    first.train()
    again = trainer(tmp_path / "resumed", max_steps=8, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-4"))
    assert_same_weights(weights(straight), weights(again), atol=0, rtol=0)


def test_cached_features_change_nothing_and_are_computed_once(tmp_path, monkeypatch):
    plain = trainer(tmp_path / "plain", loss_type="distillation")
    plain.train()
    cached = trainer(tmp_path / "cached", loss_type="distillation", cached_features=str(tmp_path / "features"))
    cached.train()
    assert_same_weights(weights(plain), weights(cached), atol=1e-6, rtol=1e-5)
    tokens = sum(len(ids) for ids in cached.train_dataset["input_ids"])
    assert (tmp_path / "features" / "features.bin").stat().st_size == tokens * 4 * 32 * (len(cached.guest.layers) + 1)

    monkeypatch.setattr(GuestTarget, "read", None)
    again = trainer(tmp_path / "again", loss_type="distillation", cached_features=str(tmp_path / "features"))
    again.train()
    assert_same_weights(weights(cached), weights(again), atol=0, rtol=0)
    with pytest.raises(ValueError, match=r"holds other features, see features\.json there: name another folder"):
        trainer(tmp_path, data=rows()[:8], cached_features=str(tmp_path / "features"))


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    outcomes = []
    for switch in (False, True):
        learner = trainer(tmp_path, gradient_checkpointing=switch)
        learner.train()
        outcomes.append(weights(learner))
    assert_same_weights(*outcomes, atol=1e-6, rtol=1e-5)


def test_a_checkpoint_holds_the_drafter_only_and_drafts_the_same(tmp_path):
    learner = trainer(tmp_path, save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4)
    learner.train()
    folder = tmp_path / "checkpoint-4"
    with safe_open(folder / "model.safetensors", framework="pt") as saved:
        assert set(saved.keys()) == set(learner.model.state_dict())
    drafter = AutoDrafter.from_pretrained(folder)
    prompt = tiny_prompt(4, seed=99)
    accepted = []
    for model in (learner.model.eval(), drafter):
        greedy(learner.target_model, prompt, 24, assistant_model=model)
        accepted.append(model.stats.accepted_at)
    assert accepted[0] == accepted[1]
    assert (folder / "acceptance.png").stat().st_size > 1000


def test_evaluation_pools_counts_and_agrees_with_generation(tmp_path):
    learner = trainer(tmp_path, objectives=["carryover"], max_steps=60, learning_rate=5e-3, num_anchors=64)
    learner.train()
    metrics = learner.evaluate()
    for name in (
        "tau",
        "tau_after_rejection",
        "tau_after_rejection_no_carry",
        "generate_tau",
        "generate_tau_no_carry",
    ):
        assert 1 <= metrics[f"eval_{name}"] <= 1 + learner.model.config.num_drafted
    shares = [metrics[f"eval_accepted_at_{slot}"] for slot in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0
    assert math.isfinite(metrics["eval_cross_entropy"])
    # The rows are what the target says, so rounds over them are those of `generate`, one for one.
    assert metrics["eval_recorded_tau"] == pytest.approx(metrics["eval_generate_tau_no_carry"])


def test_the_trainer_warns_when_generation_is_far_from_teacher_forcing(tmp_path, caplog):
    noise = [{"input_ids": [5, 6, 7 + i] + [9] * 20, "loss_mask": [0] * 3 + [1] * 20} for i in range(ROWS)]
    learner = trainer(tmp_path, data=noise, max_steps=40, learning_rate=5e-3)  # answers that the target never gave
    learner.train()
    transformers.utils.logging.enable_propagation()
    learner.evaluate()
    transformers.utils.logging.disable_propagation()
    assert "trained on something else than it meets" in caplog.text


def test_a_weight_that_is_no_longer_finite_is_named(tmp_path):
    learner = trainer(tmp_path)
    with torch.no_grad():
        learner.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"no longer finite at step 0: lower `learning_rate`"):
        learner.train()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"objectives": ["blocks"]}, "`objectives` is .*'blocks'.*: name one or more of block, carryover, loop"),
        ({"objectives": []}, "`objectives` is"),
        ({"position_weights": "linear"}, "`position_weights` is 'linear': write one of exponential, d-pace, vat"),
        ({"loss_type": "mse"}, "`loss_type` is 'mse': write one of cross-entropy, distillation, dspark, curriculum"),
        ({"verify_against": "me"}, "`verify_against` is 'me': write one of recorded, target"),
        ({"num_anchors": 0}, "`num_anchors` is 0: write at least 1"),
        ({"loss_decay": 0.0}, "`loss_decay` is 0.0"),
        ({"carry_learning_rate": -1.0}, "`carry_learning_rate` is -1.0: write a number of medians"),
        ({"cached_features": "here", "objectives": ["carryover"]}, "`cached_features` spares the target"),
        ({"fp16": True, "num_anchors": 9, "anchors_per_chunk": 8}, "`fp16` scales the loss, which comes too late"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, changes, told):
    with pytest.raises(ValueError, match=told):
        arguments(tmp_path, **changes)


def test_a_set_that_supervises_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No token of any row is supervised"):
        trainer(tmp_path, data=[{"input_ids": [4, 5, 6], "loss_mask": [0, 0, 0]}])


def test_a_target_that_does_not_fit_is_refused_before_training(tmp_path):
    drafter = random_drafter(tiny_target("qwen3", hidden_size=64, head_dim=16))
    with pytest.raises(ValueError, match="does not fit"):
        CarryoverTrainer(model=drafter, target_model=tiny_target("qwen3"), args=arguments(tmp_path))


def test_the_carry_embedding_learns_on_the_scale_of_the_features(tmp_path):
    learner = trainer(
        tmp_path, objectives=["carryover"], max_steps=1, learning_rate=1e-3, carry_learning_rate=0.5, warmup_steps=0
    )
    batch = learner.get_train_dataloader().collate_fn([learner.train_dataset[0]])
    median = learner.guest.read(batch)[0].features.abs().median().item()
    before = weights(learner)
    learner.train()
    # The first step of Adam is the learning rate in every coordinate that has a gradient.
    moved = {name: (value - before[name]).abs().max().item() for name, value in weights(learner).items()}
    assert moved.pop("carry_embedding.weight") == pytest.approx(0.5 * median, rel=1e-3)
    assert max(moved.values()) == pytest.approx(1e-3, rel=1e-2)


def test_an_adapter_trains_resumes_and_reloads_to_the_same_drafts(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["carry_embedding"])
    changes = {"peft_config": config, "objectives": ["carryover"], "max_steps": 6, "learning_rate": 1e-2}
    straight = trainer(tmp_path / "straight", **changes)
    straight.train()
    first = trainer(tmp_path / "resumed", **changes, save_strategy="steps", save_steps=3)
    first.train()
    again = trainer(tmp_path / "resumed", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-3"))
    assert_same_weights(weights(straight), weights(again), atol=0, rtol=0)

    straight.save_model(tmp_path / "adapter")
    base = random_drafter(straight.target_model)
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    prompt, drafts = tiny_prompt(4, seed=99), []
    for model in (straight.model.eval(), reloaded, reloaded.merge_and_unload()):
        greedy(straight.target_model, prompt, 24, assistant_model=model)
        drafts.append(model.stats.accepted_at)
    assert drafts[0] == drafts[1] == drafts[2]


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from tests.test_carryover_trainer import trainer\n"
        "backend = {'ddp_backend': 'gloo'} if sys.argv[2] == '2' else {}\n"
        "learner = trainer(sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), max_steps=3, **backend)\n"
        "learner.train()\n"
        "learner.save_model(sys.argv[1])\n"
        "learner.accelerator.wait_for_everyone()\n"  # gloo aborts a process that ends within its last collective
        "learner.accelerator.end_training()\n"
    )
    root = Path(__file__).parents[1]
    for name, launch, size in (
        ("one", [], "4"),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], "2"),
    ):
        command = [sys.executable, *launch, str(script), str(tmp_path / name), size]
        subprocess.run(command, check=True, cwd=root, env={**_environment(), "PYTHONPATH": _paths(root)}, timeout=240)
    saved = []
    for name in ("one", "two"):
        with safe_open(tmp_path / name / "model.safetensors", framework="pt") as file:
            saved.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    assert_same_weights(*saved, atol=1e-5, rtol=1e-4)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _paths(root: Path) -> str:
    return ":".join([str(root), *sys.path])


def test_exponential_weights_of_three_positions_by_hand():
    supervised = torch.tensor([True, True, False])
    got = position_weights("exponential", torch.zeros(3), torch.zeros(3).bool(), supervised, decay=2.0)
    torch.testing.assert_close(got, torch.tensor([1.0, math.exp(-0.5), 0.0]))


def test_d_pace_weights_of_three_positions_by_hand():
    q = torch.tensor([0.5, 1.0, 0.0])
    got = position_weights("d-pace", -q.log(), q > 0.4, torch.ones(3).bool(), decay=1.0)
    # smoothed q: .75 1 .5; prefix products .75 .75 .375; each weight sums the products from its position on
    torch.testing.assert_close(got, torch.tensor([1.875, 1.125, 0.375]))


def test_vat_weights_restart_at_the_first_miss():
    hit = torch.tensor([[True, False, True, True], [True, True, True, True]])
    got = position_weights("vat", torch.zeros(2, 4), hit, torch.ones(2, 4).bool(), decay=1.0)
    expected = [[1.0, 1.0, math.exp(-1), math.exp(-2)], [1.0] * 4]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_the_leading_run_ends_at_the_first_miss():
    hit = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert leading_run(hit, torch.ones(2, 4).bool()).tolist() == [2, 0]


def test_dspark_loss_of_two_tokens_by_hand():
    log_probs, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]])
    loss = dspark_loss(log_probs, teacher, torch.tensor([2.0]), torch.tensor([0.5]))
    # distance |.5-.75| + |.5-.25| = .5; acceptance .75, and a confidence of .5 costs log 2 whatever it is compared
    # with
    torch.testing.assert_close(loss, torch.tensor([0.1 * 2 + 0.9 * 0.5 + math.log(2)]))


def test_the_draft_vocabulary_holds_the_most_frequent_supervised_tokens():
    data = [{"input_ids": [7, 7, 7, 3, 3, 5], "loss_mask": [0, 0, 0, 1, 1, 1]}]
    assert most_frequent_tokens(data, 2, always=[9]) == [3, 9]


def test_a_drafter_can_start_from_its_targets_last_layers():
    target = tiny_target("qwen3")
    drafter = random_drafter(target)
    initialise_from_target(drafter, target)
    last = target.model.layers[-1]
    torch.testing.assert_close(drafter.layers[-1].mlp.up_proj.weight, last.mlp.up_proj.weight)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)


def test_what_was_measured_is_written_beside_the_checkpoint(tmp_path):
    learner = trainer(tmp_path, save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4)
    learner.train()
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert any("eval_tau" in entry for entry in state["log_history"])
