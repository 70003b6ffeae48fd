"""Multi-token prediction: one layer over the target's last hidden state and the next token, run on its own output."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_mtp import MTPDrafterConfig
from .modeling_chain import ChainDrafter

NATIVE_NAMES = {"enorm": "embed_norm", "hnorm": "state_norm", "mtp_block": "layers.0", "post_norm": "norm"}


class MTPDrafter(ChainDrafter):
    """One layer of multi-token prediction; [`MTPDrafter.from_target`] takes the one that a target carries."""

    config_class = MTPDrafterConfig

    def __init__(self, config: MTPDrafterConfig):
        super().__init__(config)
        self.embed_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.state_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **keys) -> "MTPDrafter":
        """
        The drafter that a target's own checkpoint carries.

        Args:
            target (`PreTrainedModel`): Loaded by `from_pretrained`; its configuration has `num_mtp_layers`.
            keys: Any other key of [`MTPDrafterConfig`], e.g. `block_size`.

        Raises:
            `ValueError`: if there is no such layer, more than one, or one of another kind.
        """
        text = target.config.get_text_config(decoder=True)
        count = getattr(text, "num_mtp_layers", None)
        if count != 1:
            raise ValueError(
                f"{type(target).__name__} has {count or 'no'} layers of multi-token prediction and this drafter runs "
                "one again and again: train one with `MTPDrafterConfig.from_target` instead."
            )
        native = MtpModel.from_pretrained(target)
        (kind,) = getattr(text, "mtp_layer_types", None) or ["full_attention"]
        rope = native.config.rope_parameters
        config = cls.config_class.from_target(
            target.config,
            layer_types=[kind],
            sliding_window=native.config.sliding_window if kind == "sliding_attention" else None,
            rope_parameters=rope.get(kind, rope),
            hidden_states_first=getattr(native.config, "mtp_hidden_states_first", False),
            qk_norm=hasattr(native.layers[0].mtp_block.self_attn, "q_norm"),
            attention_bias=getattr(text, "attention_bias", False),
            rms_norm_eps=text.rms_norm_eps,
            hidden_act=text.hidden_act,
            **keys,
        )
        drafter = cls(config).to(target.device, target.dtype).eval()
        weights = {}
        for name, weight in native.layers[0].state_dict().items():
            module, rest = name.split(".", 1)
            weights[f"{NATIVE_NAMES.get(module, module)}.{rest}"] = weight
        kept = {name for name, _ in drafter.named_parameters()} - {"carry_embedding.weight"}
        if weights.keys() != kept:
            raise ValueError(
                f"The multi-token prediction layer of {type(target).__name__} is not a dense Qwen3-like layer "
                f"({', '.join(sorted(weights.keys() ^ kept)[:4])}, …): train one with `MTPDrafterConfig.from_target` "
                "instead."
            )
        drafter.load_state_dict(weights, strict=False)
        return drafter

    def fuse(self, features: torch.Tensor, carried: torch.Tensor | None = None) -> torch.Tensor:
        return self.mark_carried(features, carried)

    def inputs(self, state: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = [self.embed_norm(embeds), self.state_norm(state)]
        if self.config.hidden_states_first:
            halves.reverse()
        joined = self.eh_proj(torch.cat(halves, dim=-1))
        return joined, self.layers[0].input_layernorm(joined)
