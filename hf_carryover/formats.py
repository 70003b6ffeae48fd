"""Checkpoints of other tools: what they are, and their configuration in our words."""

from typing import Any

from transformers import AutoConfig

from .modeling import (
    DFlashDrafter,
    DominoDrafter,
    Drafter,
    DrafterConfig,
    DSparkDrafter,
    Eagle3Drafter,
    default_target_layer_ids,
)

# Configuration keys of a Qwen3 body, which all of these formats share with us.
BODY_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
)
HEAD_KEYS = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
READ_OUT_KEYS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")

# Older names: SpecForge kept its heads in a container at first, a carry embedding was a bare vector, and EAGLE's one
# layer has a name.
RENAMED_WEIGHTS = {
    r"^logit_head\.": "",
    r"^carry_embedding$": "carry_embedding.weight",
    r"^midlayer\.": "layers.0.",
}
# Variants of the z-lab layout, by the key of `dflash_config` that asks for them.
ZLAB_VARIANTS = {"causal_head": "JetSpec", "use_swa": "ModelOpt sliding-window DFlash"}

KNOWN = "z-lab DFlash, Domino, DeepSpec and SpecForge DSpark, EAGLE-3, and speculators checkpoints of these"


Translation = tuple[type[Drafter], DrafterConfig]


def translate(config: dict[str, Any], where: str) -> Translation:
    """
    Read another tool's drafter configuration.

    Args:
        config (`dict`): The parsed `config.json`.
        where (`str`): Folder or repository, for messages.

    Returns:
        The drafter class and its configuration.

    Raises:
        `ValueError`: naming the format, if it is not a drafter that this package can run, or the key that it lacks.
    """
    try:
        return _read(config, where)
    except KeyError as key:
        raise ValueError(
            f"The `config.json` in {where!r} has no {key}, which a drafter's configuration needs."
        ) from None


def _read(config: dict[str, Any], where: str) -> Translation:
    kind = config.get("speculators_model_type")
    name = (config.get("architectures") or ["no architecture"])[0]
    nested = config.get("dflash_config") or {}
    if kind in ("dflash", "dspark"):
        return _from_speculators(config, kind)
    if kind == "eagle3":
        return _from_speculators_eagle3(config)
    if kind is None and name == "LlamaForCausalLMEagle3":
        return _from_eagle3(config)
    if kind is None and name in ("Qwen3DSparkModel", "DSparkDraftModel"):
        return _from_dspark({**config, **nested})
    if kind is None and name == "DFlashDraftModel":
        variants = [variant for key, variant in ZLAB_VARIANTS.items() if nested.get(key)]
        name, *_ = [*variants, nested.get("projector_type", "dflash")]
        if name == "dflash":
            return _from_zlab({**config, **nested})
        if name == "domino":
            return _from_domino({**config, **nested})
    raise ValueError(
        f"{where!r} is a {f'speculators {kind}' if kind else name} checkpoint, which this package cannot run: it "
        f"loads its own drafters and {KNOWN}."
    )


def _body(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in BODY_KEYS if config.get(key) is not None}


def _tied_to_target(config: dict[str, Any]) -> dict[str, Any]:
    """Feature layers and block of the formats whose ids count decoder layers and whose hooks saw raw layer outputs."""
    ids, layers = config.get("target_layer_ids"), config.get("num_target_layers")
    if ids is None:
        ids = default_target_layer_ids(config["num_target_layers"], config["num_hidden_layers"])
    if layers is not None and max(ids) == layers - 1:
        raise ValueError(
            f"`target_layer_ids` {ids} names the target's last layer, whose output this format reads before the final "
            "norm; transformers hands it out after the norm, so the drafter would be misled: use a drafter with "
            "earlier layers."
        )
    return {
        "target_layer_ids": ids,
        "num_target_layers": layers,
        "block_size": config["block_size"],
        "mask_token_id": config.get("mask_token_id"),
    }


def _from_zlab(config: dict[str, Any]) -> Translation:
    read_out = {key: config[key] for key in READ_OUT_KEYS if config.get(key) is not None}
    return DFlashDrafter, DFlashDrafter.config_class(
        **_body(config),
        **_tied_to_target(config),
        **{"input_embedding_scale": 1.0, **read_out},
        anchor_predicts=False,
        sliding_window_causal=config.get("is_causal", True),
    )


def _from_domino(config: dict[str, Any]) -> Translation:
    return DominoDrafter, DominoDrafter.config_class(
        **_body(config),
        **_tied_to_target(config),
        anchor_predicts=bool(config.get("shift_label")),
        gru_hidden_size=config["gru_hidden_dim"],
        correction_rank=config["emb_dim"],
        pure_draft_prefix=config.get("pure_draft_prefix_len", 1),
        sliding_window_causal=config.get("is_causal", True),
    )


def _from_dspark(config: dict[str, Any]) -> Translation:
    heads = {key: config[key] for key in HEAD_KEYS if config.get(key) is not None}
    return DSparkDrafter, DSparkDrafter.config_class(
        **_body(config),
        **_tied_to_target(config),
        **heads,
        anchor_predicts=True,
        confidence_head=bool(config.get("enable_confidence_head")),
        sliding_window_causal=True,  # in SpecForge; DeepSpec has no such layers
    )


def _speculators_layer(config: dict[str, Any]) -> dict[str, Any]:
    """The body, which is saved as differences from the defaults of its model type."""
    return AutoConfig.for_model(**config["transformer_layer_config"]).to_dict()


def _from_speculators(config: dict[str, Any], kind: str) -> Translation:
    layer = _speculators_layer(config)
    drafter = DSparkDrafter if kind == "dspark" else DFlashDrafter
    heads = {}
    if kind == "dspark":
        heads = {key: config[key] for key in HEAD_KEYS if config.get(key) is not None}
        heads["confidence_head"] = bool(config.get("enable_confidence_head"))
    draft_vocab = config.get("draft_vocab_size") or layer["vocab_size"]
    return drafter, drafter.config_class(
        **_body(layer),
        **heads,
        # These ids index `hidden_states`, whose entry 0 is the embedding output.
        target_layer_ids=[i - 1 for i in config["aux_hidden_state_layer_ids"]],
        block_size=config["block_size"],
        mask_token_id=config.get("mask_token_id"),
        anchor_predicts=config.get("sample_from_anchor", kind == "dspark"),
        draft_vocab_size=draft_vocab,
        own_lm_head=draft_vocab < layer["vocab_size"],
        sliding_window_causal=not config.get("sliding_window_non_causal", False),
    )


def _from_eagle3(config: dict[str, Any], **keys: Any) -> Translation:
    ids = (config.get("eagle_config") or config).get("eagle_aux_hidden_state_layer_ids")
    if ids is None and config.get("num_target_layers") is None:
        raise ValueError(
            "This EAGLE-3 checkpoint does not say which target layers it reads: pass `num_target_layers`, how many "
            "the target has, to `AutoDrafter.from_pretrained`."
        )
    if ids is None:
        ids = [2, config["num_target_layers"] // 2, config["num_target_layers"] - 3]
    return Eagle3Drafter, Eagle3Drafter.config_class(
        **{"head_dim": config["hidden_size"] // config["num_attention_heads"], **_body(config)},
        target_layer_ids=[i - 1 for i in ids],  # these index `hidden_states`, whose entry 0 is the embedding output
        num_target_layers=config.get("num_target_layers"),
        target_hidden_size=config.get("target_hidden_size"),
        draft_vocab_size=config.get("draft_vocab_size"),
        **keys,
    )


def _from_speculators_eagle3(config: dict[str, Any]) -> Translation:
    if unknown := [key for key in ("norm_before_fc", "fc_norm") if config.get(key)]:
        raise ValueError(
            f"This speculators eagle3 checkpoint norms its features before fusing them (`{unknown[0]}`), which this "
            "package cannot run: use one without."
        )
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = {"block_size": methods[0]["speculative_tokens"]} if methods[0].get("speculative_tokens") else {}
    return _from_eagle3(
        {**_speculators_layer(config), **config, "num_hidden_layers": 1},
        **drafted,
        norm_before_residual=config.get("norm_before_residual", False),
        norm_output=config.get("norm_output", False),
    )
