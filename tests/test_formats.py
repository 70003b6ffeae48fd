"""Public formats load as what they are, with the logits of a forward written from its description, or are refused."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import hf_carryover.modeling
from hf_carryover import AutoDrafter, DFlashDrafter, DFlashDrafterConfig, DSparkDrafter, DSparkDrafterConfig
from tests.reference import (
    BODY,
    HIDDEN,
    MASK,
    TARGET_LAYERS,
    VOCABULARY,
    Case,
    Reference,
    Weights,
    body_weights,
    close,
    confidence_weights,
    head_weights,
    zlab_config,
)

RANK = 5
MARKOV_HEADS = ["vanilla", "gated", "rnn"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def checkpoint(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def deepspec_config(**keys: Any) -> dict[str, Any]:
    """Flat, a copy of the target's with the drafter's keys added."""
    tied = {"num_target_layers": TARGET_LAYERS, "target_layer_ids": [1, 3], "mask_token_id": MASK, "block_size": 4}
    return {
        **BODY,
        **tied,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "num_anchors": 512,
        "enable_confidence_head": False,
        "markov_rank": 0,
        **keys,
    }


def specforge_config(**keys: Any) -> dict[str, Any]:
    """DSpark with all but the block size nested, and no embedding or head in the file."""
    nested = {"attention_mode": "gqa", "projector_type": "dspark", "mask_token_id": MASK, "target_layer_ids": [1, 3]}
    nested |= {"markov_rank": RANK, "markov_head_type": "vanilla"}
    nested |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "confidence_head_alpha": 1.0}
    return zlab_config(architectures=["DSparkDraftModel"], dflash_config=nested | keys)


def speculators_config(kind: str, **keys: Any) -> dict[str, Any]:
    """No `model_type`, the body in `transformer_layer_config`, ids that index `hidden_states`."""
    layer = {key: value for key, value in BODY.items() if value != getattr(Qwen3Config(), key)}
    return {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}.get(kind, "OtherSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [], "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": {"model_type": "qwen3", "rope_theta": 10000.0, **layer},
        "draft_vocab_size": VOCABULARY,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        **keys,
    }


def borrowed_copies() -> Weights:
    return {"embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN), "lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}


def reference_hidden(case: Case, reference: Reference, slots: int = 4) -> torch.Tensor:
    return reference.hidden(case.features, case.embedding(case.block(slots)))


# z-lab DFlash


@pytest.mark.parametrize("nested", [False, True], ids=["block size at the top", "block size nested"])
def test_zlab_drafts_the_masked_slots(tmp_path, nested):
    config, weights, case = zlab_config(), body_weights(), Case.random()
    if nested:
        config["dflash_config"]["block_size"] = config.pop("block_size")
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    assert type(drafter) is DFlashDrafter
    assert not drafter.training
    assert (drafter.config.num_drafted, drafter.config.anchor_predicts, drafter.config.carryover) == (3, False, False)
    close(case.logits_of(drafter), case.head(reference_hidden(case, Reference(weights)))[1:])


@pytest.mark.parametrize("keys", [{}, {"is_causal": False}], ids=["causal by default", "bidirectional"])
def test_zlab_window_layers_are_causal_in_the_block_unless_told(tmp_path, keys):
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    weights, case = body_weights(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(**window, **keys), weights))
    reference = Reference(weights, windows=[3, None], causal=not keys)
    close(case.logits_of(drafter), case.head(reference_hidden(case, reference))[1:])


def test_zlab_output_keys_shape_the_logits(tmp_path):
    config, weights, case = zlab_config(), body_weights(), Case.random()
    config["dflash_config"] |= {"output_multiplier": 3.0, "final_logit_softcapping": 2.0, "input_embedding_scale": 0.5}
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    hidden = Reference(weights).hidden(case.features, 0.5 * case.embedding(case.block(4)))
    close(case.logits_of(drafter), 2 * torch.tanh(3 * case.head(hidden)[1:] / 2))


def test_zlab_reads_raw_rows_of_a_scaled_embedding(tmp_path):
    weights, case = body_weights(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(), weights))
    expected = case.head(reference_hidden(case, Reference(weights)))[1:]
    scaled = Gemma3TextScaledWordEmbedding(VOCABULARY, HIDDEN, 0, embed_scale=HIDDEN**0.5)
    scaled.weight = case.embedding.weight
    case.embedding = scaled
    close(case.logits_of(drafter), expected)


def test_missing_target_layers_follow_the_dflash_rule(tmp_path):
    config = zlab_config(num_target_layers=36, num_hidden_layers=2)
    del config["dflash_config"]["target_layer_ids"]
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, body_weights()))
    assert drafter.config.target_layer_ids == [1, 33]


def test_carry_embedding_under_zlab_names_switches_carryover_on(tmp_path):
    weights = body_weights() | {"carry_embedding": torch.randn(2 * HIDDEN)}
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(), weights))
    assert drafter.config.carryover
    assert drafter.generation_config.carryover
    assert torch.equal(drafter.carry_embedding.weight, weights["carry_embedding"])


def test_attention_biases_are_read(tmp_path):
    weights, case = body_weights(bias=True), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(attention_bias=True), weights))
    close(case.logits_of(drafter), case.head(reference_hidden(case, Reference(weights)))[1:])


# RoPE


def test_partial_rotary_turns_the_first_channels_only(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1 / 3}
    weights, case = body_weights(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(rope_parameters=rope), weights))
    close(case.logits_of(drafter), case.head(reference_hidden(case, Reference(weights, rotary=4)))[1:])


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0}], ids=["plain", "yarn"])
def test_legacy_and_new_rope_keys_say_the_same(tmp_path, scaling):
    new, weights, case = zlab_config(), body_weights(), Case.random(rows=60)
    new["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": 777.0}
    del new["rope_theta"]
    legacy = zlab_config(rope_theta=777.0, rope_scaling=scaling)
    ours, theirs = (
        AutoDrafter.from_pretrained(checkpoint(tmp_path / name, config, weights))
        for name, config in (("new", new), ("legacy", legacy))
    )
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    assert ours.config.rope_parameters["rope_theta"] == 777.0
    assert torch.equal(case.logits_of(ours), case.logits_of(theirs))
    if scaling is None:
        close(case.logits_of(ours), case.head(reference_hidden(case, Reference(weights, theta=777.0)))[1:])


# DSpark


def check_dspark(drafter: DSparkDrafter, case: Case, reference: Reference, kind: str, head: torch.nn.Module):
    """Logits after given tokens, the tokens chosen greedily, and the layout: every slot predicts."""
    slots = drafter.config.block_size
    assert type(drafter) is DSparkDrafter
    assert drafter.config.anchor_predicts
    hidden = reference_hidden(case, reference, slots)
    previous = [case.anchor, *range(10, 9 + slots)]
    expected = head(hidden) + reference.markov(kind, hidden, previous)
    logits = case.logits_of(drafter)[None]
    given = drafter.teacher_forced(case.hidden_of(drafter), logits, torch.tensor([previous]), None)
    close(given[0].detach(), expected)

    tokens = [case.anchor]
    for _ in range(slots):
        after = head(hidden) + reference.markov(kind, hidden, (tokens + [0] * slots)[:slots])
        tokens.append(int(after[len(tokens) - 1].argmax()))
    chosen = drafter.choose(
        case.hidden_of(drafter), logits, torch.tensor([[case.anchor]]), lambda x: x.argmax(-1), None
    )
    assert chosen[0].tolist() == tokens[1:]


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_deepspec_dspark_runs_its_markov_head(tmp_path, kind):
    config = deepspec_config(markov_rank=RANK, markov_head_type=kind)
    weights, case = body_weights() | head_weights(kind, RANK) | borrowed_copies(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    check_dspark(drafter, case, Reference(weights), kind, case.head)


def test_deepspec_dflash_is_a_dspark_without_heads(tmp_path):
    weights, case = body_weights() | borrowed_copies(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, deepspec_config(), weights))
    assert drafter.config.num_drafted == 4
    assert not any("head" in name for name in drafter.state_dict())
    close(case.logits_of(drafter), case.head(reference_hidden(case, Reference(weights))))


@pytest.mark.parametrize("with_markov", [False, True])
def test_deepspec_confidence_reads_the_slot_and_the_token_before(tmp_path, with_markov):
    keys = {"enable_confidence_head": True, "confidence_head_with_markov": with_markov}
    config = deepspec_config(markov_rank=RANK, markov_head_type="vanilla", **keys)
    weights = body_weights() | head_weights("vanilla", RANK) | confidence_weights(HIDDEN + RANK * with_markov)
    case, tokens = Case.random(), [3, 1, 4, 1]
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    states = reference_hidden(case, Reference(weights))
    if with_markov:
        states = torch.cat((states, weights["markov_head.markov_w1.weight"][[case.anchor, *tokens[:-1]]]), dim=-1)
    expected = states @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"]
    with torch.no_grad():
        sure = drafter.confidence(case.hidden_of(drafter), torch.tensor([[case.anchor]]), torch.tensor([tokens]))
    close(sure[0], expected.sigmoid())


@pytest.mark.parametrize("container", ["", "logit_head."], ids=["heads at the top", "heads in a container"])
def test_specforge_dspark_reads_its_nested_keys(tmp_path, container):
    weights, case = body_weights(), Case.random()
    heads = head_weights("vanilla", RANK) | confidence_weights(HIDDEN + RANK)
    saved = weights | {container + name: weight for name, weight in heads.items()}
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, specforge_config(), saved))
    assert torch.equal(drafter.confidence_head.proj.weight, heads["confidence_head.proj.weight"])
    check_dspark(drafter, case, Reference(weights | heads), "vanilla", case.head)


def test_specforge_window_layers_are_causal_in_the_block(tmp_path):
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    weights, case = body_weights() | head_weights("vanilla", RANK), Case.random()
    config = specforge_config(enable_confidence_head=False, confidence_head_with_markov=False) | window
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    check_dspark(drafter, case, Reference(weights, windows=[3, None], causal=True), "vanilla", case.head)


# speculators


def draft_vocabulary(size: int = 10) -> tuple[list[int], Weights]:
    """Target ids of the draft vocabulary, and the buffers that say so: offsets, and membership."""
    ids = sorted(torch.randperm(VOCABULARY - 1)[:size].tolist())
    member = torch.zeros(VOCABULARY, dtype=torch.bool)
    member[ids] = True
    return ids, {"d2t": torch.tensor(ids) - torch.arange(size), "t2d": member}


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_speculators_dflash_counts_layers_from_the_embedding(tmp_path, sample_from_anchor):
    config = speculators_config("dflash", sample_from_anchor=sample_from_anchor)
    weights, case = body_weights() | borrowed_copies(), Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    assert type(drafter) is DFlashDrafter
    assert drafter.config.target_layer_ids == [1, 3]
    expected = case.head(reference_hidden(case, Reference(weights)))
    close(case.logits_of(drafter), expected if sample_from_anchor else expected[1:])


def test_speculators_layout_defaults_differ_by_method(tmp_path):
    for kind, heads, drafted in (("dflash", {}, 3), ("dspark", head_weights("vanilla", RANK), 4)):
        config = speculators_config(kind, markov_rank=RANK, markov_head_type="vanilla")
        drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path / kind, config, body_weights() | heads))
        assert drafter.config.num_drafted == drafted


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_speculators_dspark_drafts_over_its_own_vocabulary(tmp_path, kind):
    ids, maps = draft_vocabulary()
    config = speculators_config("dspark", draft_vocab_size=len(ids), markov_rank=RANK, markov_head_type=kind)
    weights = body_weights() | head_weights(kind, RANK, len(ids)) | borrowed_copies() | maps
    weights["lm_head.weight"] = torch.randn(len(ids), HIDDEN)
    case = Case.random()
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))
    assert drafter.d2t.tolist() == ids
    hidden = reference_hidden(case, Reference(weights))
    close(case.logits_of(drafter), hidden @ weights["lm_head.weight"].T)

    logits = case.logits_of(drafter)[None]
    seen = []
    tokens = drafter.choose(
        case.hidden_of(drafter),
        logits,
        torch.tensor([[case.anchor]]),
        lambda scores: seen.append(scores.detach()) or scores.argmax(-1),
        None,
    )
    assert set(tokens[0].tolist()) <= set(ids)
    first = logits[0, 0] + Reference(weights).markov(kind, hidden[:1], [case.anchor])[0]
    close(seen[0][0, 0, ids], first)
    assert (seen[0].softmax(-1) > 0).sum() == len(ids)

    drafter.save_pretrained(tmp_path / "ours")
    again = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert again.d2t.tolist() == ids
    assert torch.equal(case.logits_of(again)[None], logits)


# Refusals


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (speculators_config("peagle"), "speculators peagle"),
        (speculators_config("dflash2"), "speculators dflash2"),
        (zlab_config(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
        (zlab_config(dflash_config={"projector_type": "medusa"}), "medusa"),
        (zlab_config(dflash_config={"causal_head": True}), "JetSpec"),
        (zlab_config(dflash_config={"use_swa": True, "swa_window_size": 4}), "ModelOpt sliding-window DFlash"),
        (zlab_config(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
        (deepspec_config(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel"),
        ({"model_type": "qwen3"}, "no architecture"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_checkpoints_are_refused_by_name(tmp_path, config, name):
    folder = checkpoint(tmp_path, config, body_weights())
    with pytest.raises(ValueError, match=f"is a {name} checkpoint, which this package cannot run") as refusal:
        AutoDrafter.from_pretrained(folder)
    assert "EAGLE-3, and speculators checkpoints of these" in str(refusal.value)


@pytest.mark.parametrize("drafter_class", [DFlashDrafter, DSparkDrafter])
@pytest.mark.parametrize(
    ("config", "found"),
    [
        (zlab_config(), "DFlashDraftModel"),
        (deepspec_config(), "Qwen3DSparkModel"),
        (speculators_config("dflash"), "DFlashSpeculator"),
    ],
    ids=["z-lab", "DeepSpec", "speculators"],
)
def test_a_drafter_class_refuses_foreign_folders_and_names_auto_drafter(tmp_path, drafter_class, config, found):
    folder = checkpoint(tmp_path, config, body_weights())
    with pytest.raises(ValueError, match=rf"holds a {found}, not a \w+: `hf_carryover.AutoDrafter.from_pretrained`"):
        drafter_class.from_pretrained(folder)


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids"])
def test_a_configuration_that_lacks_a_key_is_refused_by_the_key(tmp_path, key):
    config = zlab_config()
    config.pop(key, None)
    config["dflash_config"].pop(key, None)
    del config["num_target_layers"]
    with pytest.raises(
        ValueError, match=r"has no '(block_size|num_target_layers)', which a drafter's configuration needs"
    ):
        AutoDrafter.from_pretrained(checkpoint(tmp_path, config, body_weights()))


@pytest.mark.parametrize("config", [zlab_config(), deepspec_config()], ids=["z-lab", "DeepSpec"])
def test_foreign_features_of_the_last_layer_are_refused(tmp_path, config):
    nested = config.get("dflash_config", config)
    nested["target_layer_ids"] = [1, TARGET_LAYERS - 1]
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[1, 5\] names the target's last layer"):
        AutoDrafter.from_pretrained(checkpoint(tmp_path, config, body_weights()))


def test_a_weight_that_is_missing_left_over_or_misshapen_is_an_error(tmp_path):
    def load(**changes: torch.Tensor | None):
        weights = {name: weight for name, weight in (body_weights() | changes).items() if weight is not None}
        AutoDrafter.from_pretrained(checkpoint(tmp_path, zlab_config(), weights))

    load()
    with pytest.raises(ValueError, match=r"missing keys: layers\.1\.self_attn\.q_norm\.weight"):
        load(**{"layers.1.self_attn.q_norm.weight": None})
    with pytest.raises(ValueError, match=r"unexpected keys: sinks\.0"):
        load(**{"sinks.0": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"mismatched keys: .*fc\.weight"):
        load(**{"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)})


def test_a_draft_vocabulary_without_its_map_is_an_error(tmp_path):
    config = speculators_config("dflash", draft_vocab_size=10)
    weights = body_weights() | {"lm_head.weight": torch.randn(10, HIDDEN)}
    with pytest.raises(ValueError, match="missing keys: d2t"):
        AutoDrafter.from_pretrained(checkpoint(tmp_path, config, weights))


# Ours


def our_drafter(drafter_class: type = DFlashDrafter, **keys: Any) -> DFlashDrafter:
    ties = {"target_layer_ids": [1, 3], "num_target_layers": TARGET_LAYERS, "block_size": 4, "mask_token_id": MASK}
    drafter = drafter_class(drafter_class.config_class(**{**BODY, **ties, "initializer_range": 0.2, **keys})).eval()
    if drafter.carry_embedding is not None:
        torch.nn.init.normal_(drafter.carry_embedding.weight)
    return drafter


OURS = {
    "DFlash": lambda: our_drafter(carryover=True, anchor_predicts=True),
    "DFlash over a draft vocabulary": lambda: our_drafter(draft_vocab_size=10, own_lm_head=True),
    "DFlash with a window": lambda: our_drafter(
        layer_types=["sliding_attention", "full_attention"], sliding_window=3, sliding_window_causal=True
    ),
    "DFlash with a scaled rotation": lambda: our_drafter(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 1 / 3}
    ),
    "DSpark": lambda: our_drafter(
        DSparkDrafter, markov_rank=RANK, markov_head_type="rnn", confidence_head=True, carryover=True
    ),
}


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
@pytest.mark.parametrize("loader", [AutoDrafter, AutoModel])
def test_saving_and_loading_changes_nothing(tmp_path, make, loader):
    drafter, case = make(), Case.random()
    drafter.save_pretrained(tmp_path)
    again = loader.from_pretrained(tmp_path)
    assert type(again) is type(drafter)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert again.generation_config.to_dict() == drafter.generation_config.to_dict()
    weights, loaded = drafter.state_dict(), again.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    assert torch.equal(case.logits_of(again), case.logits_of(drafter))


def test_borrowed_embedding_and_head_are_never_in_the_file(tmp_path):
    drafter, case = our_drafter(), Case.random()
    case.logits_of(drafter)
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert names == set(drafter.state_dict())
        assert all(VOCABULARY not in file.get_slice(name).get_shape() for name in names)


@pytest.mark.parametrize("carryover", [False, True])
def test_drafting_settings_are_saved_with_the_weights(tmp_path, carryover):
    drafter = our_drafter(carryover=True)
    assert drafter.generation_config.carryover
    drafter.generation_config.carryover = carryover
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(tmp_path)
    for loader in (AutoDrafter, AutoModel, DFlashDrafter):
        again = loader.from_pretrained(tmp_path).generation_config
        assert again.carryover is carryover
        assert again.num_assistant_tokens == 2
    (tmp_path / "generation_config.json").unlink()
    assert AutoDrafter.from_pretrained(tmp_path).generation_config.carryover


def test_one_of_our_drafters_is_not_another(tmp_path):
    our_drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a DFlashDrafter, not a dspark_drafter"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_registering_twice_is_harmless():
    importlib.reload(hf_carryover.modeling)
    for config_class, drafter_class in (
        (DFlashDrafterConfig, DFlashDrafter),
        (DSparkDrafterConfig, DSparkDrafter),
    ):
        config = AutoConfig.for_model(config_class.model_type)
        assert type(config) is config_class
        assert AutoModel._model_mapping[config_class] is drafter_class


def test_a_plain_qwen3_is_not_taken_for_a_drafter(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**BODY)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a Qwen3ForCausalLM checkpoint"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_folder_without_a_configuration_is_told_from_a_foreign_one(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json: name the folder"):
        AutoDrafter.from_pretrained(tmp_path)
