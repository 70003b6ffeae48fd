"""How `target.generate(assistant_model=drafter)` finds us: a mixin on the loaded target, nothing patched."""

from functools import cache

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import CandidateGenerator

from .candidates import CarryoverCandidateGenerator
from .pairing import check_pair, check_target, is_drafter
from .settings import DraftCall, DraftSettings
from .stopping import PrefixStopping, stops_inside_block


class CarryoverGenerationMixin(GenerationMixin):
    """`GenerationMixin` that understands drafters; any other assistant, or none, is left to transformers."""

    def generate(self, *args, assistant_model=None, **kwargs):
        """
        `GenerationMixin.generate`; with a drafter as `assistant_model` it also takes the [`DraftSettings`] as
        arguments (`carryover`, `loop_threshold`, …), for this call only. The counts of the call are in `drafter.stats`
        afterwards.

        Raises:
            `ValueError`: if target and drafter do not fit, or the call asks for what drafting cannot do yet.
        """
        if not is_drafter(assistant_model):
            return super().generate(*args, assistant_model=assistant_model, **kwargs)
        check_target(self)
        check_pair(self, assistant_model)
        overrides = {name: kwargs.pop(name) for name in DraftSettings.names() if name in kwargs}
        return super().generate(*args, assistant_model=DraftCall.of(assistant_model, overrides), **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: GenerationConfig,
        input_ids: torch.LongTensor,
        *args,
        assistant_model=None,
        **kwargs,
    ) -> CandidateGenerator:
        if not isinstance(assistant_model, DraftCall):
            return super()._get_candidate_generator(
                generation_config, input_ids, *args, assistant_model=assistant_model, **kwargs
            )
        generator = CarryoverCandidateGenerator(
            self,
            assistant_model,
            generation_config,
            kwargs["logits_processor"],
            attention_mask=kwargs["model_kwargs"].get("attention_mask"),
        )
        assistant_model.drafter.stats = generator.stats
        return generator

    def _assisted_decoding(
        self, input_ids, logits_processor, stopping_criteria, generation_config, *args, streamer=None, **kwargs
    ):
        loop = super()._assisted_decoding
        call = kwargs.get("assistant_model")
        if isinstance(call, DraftCall):
            refuse_call(input_ids, kwargs)
        if not (isinstance(call, DraftCall) and stops_inside_block(stopping_criteria)):
            return loop(
                input_ids, logits_processor, stopping_criteria, generation_config, *args, streamer=streamer, **kwargs
            )
        stopping = PrefixStopping(stopping_criteria, input_ids.shape[1], kwargs["cache"], streamer)
        output = loop(input_ids, logits_processor, stopping, generation_config, *args, streamer=stopping, **kwargs)
        call.drafter.stats.forget_last(stopping.cut)
        return stopping.trim(output)


def refuse_call(input_ids: torch.LongTensor, model_kwargs: dict):
    """
    Raises:
        `ValueError`: if the call has more than one row, embeddings instead of tokens, or no cache that is empty and
            can drop rejected tokens.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"A drafter drafts for one sequence at a time and `input_ids` has {input_ids.shape[0]}: call `generate` "
            "once for each, or without `assistant_model`."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("A drafter needs the prompt's tokens: pass `input_ids` instead of `inputs_embeds`.")
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError("A drafter's target needs its cache: leave `use_cache=False` out.")
    if (filled := cache.get_seq_length()) > 0:
        raise ValueError(
            f"The cache passed to `generate` already holds {filled} positions, for which the drafter has no "
            "features: pass the whole conversation as `input_ids` and no cache."
        )
    if not cache.is_croppable:
        raise ValueError(
            f"This call's {type(cache).__name__} cannot drop rejected tokens again, as quantised caches and static "
            "ones with sliding-window layers cannot: leave `cache_implementation` out."
        )


@cache
def _enabled(model_class: type) -> type:
    names = {key: getattr(model_class, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (CarryoverGenerationMixin, model_class), names)


def enable(target: PreTrainedModel) -> PreTrainedModel:
    """
    Let `target.generate` take a drafter as `assistant_model`.

    The instance gets a subclass of its class, of the same name, so that saving and printing it tell no difference.
    Enabling twice does nothing; [`disable`] undoes it.

    Args:
        target (`PreTrainedModel`): A loaded decoder-only language model, or a PEFT model around one.

    Returns:
        `target` itself.

    Raises:
        `ValueError`: if no drafter can draft for it.
    """
    model = _generating_model(target)
    check_target(model)
    if not isinstance(model, CarryoverGenerationMixin):
        model.__class__ = _enabled(model.__class__)
    return target


def disable(target: PreTrainedModel) -> PreTrainedModel:
    """Undo [`enable`]; returns `target` itself, whether or not it was enabled."""
    model = _generating_model(target)
    if isinstance(model, CarryoverGenerationMixin):
        model.__class__ = type(model).__mro__[2]
    return target


def _generating_model(target) -> PreTrainedModel:
    return target.get_base_model() if hasattr(target, "get_base_model") else target
