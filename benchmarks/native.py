"""transformers' own DFlash drafter with the weights of one of ours, to compare with."""

import copy

from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from hf_carryover import DFlashDrafter

SHARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "layer_types",
    "hidden_act",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
)
OURS_ONLY = ("carry_embedding", "d2t")
RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def native_twin(drafter: DFlashDrafter, model_class: type = MuseGlimmerAssistantModel) -> MuseGlimmerAssistantModel:
    """
    The native drafter knows neither carried rows nor a draft vocabulary: these weights are left out.

    Args:
        drafter (`DFlashDrafter`): Without biases and with slots that predict their own position.
        model_class (`type`): `MuseGlimmerAssistantModel` or a subclass.
    """
    config = MuseGlimmerAssistantConfig(**{key: getattr(drafter.config, key) for key in SHARED_KEYS})
    if drafter.config.sliding_window is not None:
        config.sliding_window = drafter.config.sliding_window - 1  # it counts the rows behind, we count the slot too
    twin = model_class(config).eval().to(drafter.device, drafter.dtype)
    weights = {name: weight for name, weight in drafter.state_dict().items() if not name.startswith(OURS_ONLY)}
    for old, new in RENAMED.items():
        weights = {new + name[len(old) :] if name.startswith(old) else name: row for name, row in weights.items()}
    twin.load_state_dict(weights)
    return twin


def over_whole_vocabulary(drafter: DFlashDrafter) -> DFlashDrafter:
    """The same drafter, reading out with the target's whole head as the native one does."""
    config = copy.deepcopy(drafter.config)
    config.draft_vocab_size = config.vocab_size
    twin = type(drafter)(config).eval().to(drafter.device, drafter.dtype)
    twin.load_state_dict({name: weight for name, weight in drafter.state_dict().items() if name != "d2t"})
    return twin
