"""Whether a drafter and a target fit, decided before the first forward."""

from transformers import GenerationConfig, PreTrainedModel

# Cache layers that can drop rejected rows again.
CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def is_drafter(model) -> bool:
    """
    Whether `model` keeps the drafters' promise.

    The promise is asked for, not the class: a drafter loaded as remote code or wrapped by PEFT is of another class.
    """
    config = getattr(model, "config", None)
    return all(hasattr(config, key) for key in ("anchor_predicts", "target_layer_ids")) and hasattr(model, "fuse")


def check_target(target: PreTrainedModel):
    """
    Raises:
        `ValueError`: if no drafter can draft for `target`; the message says why and what to do.
    """
    name = type(target).__name__
    if not hasattr(target, "_assisted_decoding"):
        raise ValueError(
            f"{name} has no `generate`: pass a causal language model, e.g. from "
            "`AutoModelForCausalLM.from_pretrained`."
        )
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: drafters need a decoder-only target.")
    text = target.config.get_text_config(decoder=True)
    recurrent = sorted(set(getattr(text, "layer_types", None) or []) - CROPPABLE_LAYERS)
    if recurrent or getattr(target, "_is_stateful", False):
        kind = f"{', '.join(recurrent)} layers" if recurrent else "a recurrent state"
        raise ValueError(
            f"{name} has {kind}, whose memory cannot be taken back after a rejected draft: use a target with "
            "attention layers only, or `generate` without `assistant_model`."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head to draft with: load it with `AutoModelForCausalLM.from_pretrained`.")


def check_pair(target: PreTrainedModel, drafter):
    """
    Raises:
        `ValueError`: naming everything in which `drafter` does not fit `target`.
    """
    config, text = drafter.config, target.config.get_text_config(decoder=True)
    rows = getattr(target.get_input_embeddings(), "num_embeddings", text.vocab_size)  # a wrapped one may not say
    faults = []
    if config.target_hidden_size != text.hidden_size:
        faults.append(
            f"it reads hidden states of width {config.target_hidden_size}, the target's are {text.hidden_size}"
        )
    if config.vocab_size != text.vocab_size:
        faults.append(f"it drafts for a vocabulary of {config.vocab_size}, the target's is {text.vocab_size}")
    layers = config.num_target_layers
    if layers is not None and layers != text.num_hidden_layers:
        faults.append(f"it was made for {layers} target layers, the target has {text.num_hidden_layers}")
    if outside := [i for i in config.target_layer_ids if not -1 <= i < text.num_hidden_layers]:
        faults.append(
            f"its `target_layer_ids` {outside} are not among the target's layers 0 to {text.num_hidden_layers - 1}"
        )
    mask = config.mask_token_id
    if mask is not None and not 0 <= mask < rows:
        faults.append(f"its `mask_token_id` {mask} is outside the target's embedding of {rows} rows")
    if mask in end_tokens(target.generation_config):
        faults.append(f"its `mask_token_id` {mask} is the target's end token")
    if faults:
        raise ValueError(
            f"This {type(drafter).__name__} does not fit this {type(target).__name__}: {'; '.join(faults)}. Load the "
            "drafter that was trained for this target, or train one."
        )


def end_tokens(config: GenerationConfig) -> list[int]:
    """`list[int]`: The ids at which generation stops; none if `config` names none."""
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
