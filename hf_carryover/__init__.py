"""
Faster `model.generate()` with the same output, by drafters that keep what the target rejected.

Importing this package registers its drafters with `AutoConfig` and `AutoModel`.
"""

from .auto import AutoDrafter
from .generation import DraftStats, disable, enable
from .lossless import Difference, first_difference
from .modeling import (
    DFlashDrafter,
    DFlashDrafterConfig,
    DominoDrafter,
    DominoDrafterConfig,
    DSparkDrafter,
    DSparkDrafterConfig,
    Eagle3Drafter,
    Eagle3DrafterConfig,
    MTPDrafter,
    MTPDrafterConfig,
)

__all__ = [
    "AutoDrafter",
    "CarryoverTrainer",
    "CarryoverTrainingArguments",
    "DFlashDrafter",
    "DFlashDrafterConfig",
    "DSparkDrafter",
    "DSparkDrafterConfig",
    "Difference",
    "DominoDrafter",
    "DominoDrafterConfig",
    "DraftStats",
    "Eagle3Drafter",
    "Eagle3DrafterConfig",
    "MTPDrafter",
    "MTPDrafterConfig",
    "disable",
    "enable",
    "first_difference",
]


def __getattr__(name: str):
    """Training is imported when it is asked for: it needs the packages of the extra `train`."""
    if name not in ("CarryoverTrainer", "CarryoverTrainingArguments"):
        raise AttributeError(f"module 'hf_carryover' has no attribute {name!r}")
    try:
        from . import trainer
    except ImportError as error:
        raise ImportError(f"{name} needs `pip install hf-carryover[train]` ({error}).") from error
    return getattr(trainer, name)
