"""What a drafter is: its configuration, its body and heads, its cache. Importing this registers the drafters."""

from transformers import AutoConfig, AutoModel

from .cache_drafter import DrafterCache
from .configuration_dflash import DFlashDrafterConfig
from .configuration_domino import DominoDrafterConfig
from .configuration_drafter import DrafterConfig, default_target_layer_ids
from .configuration_dspark import DSparkDrafterConfig
from .configuration_eagle3 import Eagle3DrafterConfig
from .configuration_mtp import MTPDrafterConfig
from .modeling_dflash import DFlashDrafter
from .modeling_domino import DominoDrafter
from .modeling_drafter import Drafter
from .modeling_dspark import DSparkDrafter
from .modeling_eagle3 import Eagle3Drafter
from .modeling_mtp import MTPDrafter
from .modeling_relay import HISTORY, History, Pools, RepairSelector, Walk

DRAFTERS = (DFlashDrafter, DSparkDrafter, DominoDrafter, Eagle3Drafter, MTPDrafter)
for drafter in DRAFTERS:
    AutoConfig.register(drafter.config_class.model_type, drafter.config_class, exist_ok=True)
    AutoModel.register(drafter.config_class, drafter, exist_ok=True)
    # Saving a drafter also copies these files beside its weights, for `trust_remote_code=True` without this package.
    drafter.config_class.register_for_auto_class("AutoConfig")
    drafter.register_for_auto_class("AutoModel")

__all__ = [
    "DRAFTERS",
    "HISTORY",
    "DFlashDrafter",
    "DFlashDrafterConfig",
    "DSparkDrafter",
    "DSparkDrafterConfig",
    "DominoDrafter",
    "DominoDrafterConfig",
    "Drafter",
    "DrafterCache",
    "DrafterConfig",
    "Eagle3Drafter",
    "Eagle3DrafterConfig",
    "History",
    "MTPDrafter",
    "MTPDrafterConfig",
    "Pools",
    "RepairSelector",
    "Walk",
    "default_target_layer_ids",
]
