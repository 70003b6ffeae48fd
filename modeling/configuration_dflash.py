from .configuration_drafter import DrafterConfig


class DFlashDrafterConfig(DrafterConfig):
    """Configuration of a [`DFlashDrafter`]: the shared keys of [`DrafterConfig`] and no others."""

    model_type = "dflash_drafter"
