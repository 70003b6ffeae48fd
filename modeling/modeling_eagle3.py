"""EAGLE-3 (arXiv 2503.01840): a chain over the fused features of a low, a middle and a high layer of the target."""

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_eagle3 import Eagle3DrafterConfig
from .modeling_chain import ChainDrafter, ChainLayer


class Eagle3Layer(ChainLayer):
    """Attention reads the embedding and the state side by side, each after a norm of its own."""

    def __init__(self, config: Eagle3DrafterConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)


class Eagle3Drafter(ChainDrafter):
    """An EAGLE-3 drafter, with the names of the public checkpoints: `fc`, `layers.0`, `norm`, `lm_head`, `d2t`."""

    config_class = Eagle3DrafterConfig
    _no_split_modules = ["Eagle3Layer"]
    _layer_class = Eagle3Layer

    def __init__(self, config: Eagle3DrafterConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.post_init()

    def fuse(self, features: torch.Tensor, carried: torch.Tensor | None = None) -> torch.Tensor:
        return self.fc(self.mark_carried(features, carried))

    def inputs(self, state: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[0]
        normed = layer.hidden_norm(state)
        reading = torch.cat((layer.input_layernorm(embeds), normed), dim=-1)
        return (normed if self.config.norm_before_residual else state), reading
