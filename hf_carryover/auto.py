"""Load any drafter, ours or another tool's."""

import torch
from safetensors import safe_open
from transformers import AutoModel, PreTrainedConfig
from transformers.utils import cached_file

from .formats import RENAMED_WEIGHTS, translate
from .modeling import DRAFTERS, Drafter, Eagle3Drafter

OUR_MODEL_TYPES = {drafter.config_class.model_type for drafter in DRAFTERS}
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class AutoDrafter:
    """Loads drafters from a folder or a Hub repository; `AutoModel` does too, for those saved by this package."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, num_target_layers: int | None = None, **kwargs) -> Drafter:
        """
        Load a drafter of this package, or a z-lab DFlash, Domino, DeepSpec, SpecForge DSpark, EAGLE-3 or speculators
        checkpoint.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub repository.
            num_target_layers (`int`, *optional*):
                Decoder layers of the target, for EAGLE-3 checkpoints, whose configuration may not say which layers
                they read.
            kwargs: As for `AutoModel.from_pretrained`, e.g. `dtype`, `device_map`, `revision`.

        Returns:
            [`Drafter`]: In evaluation mode.

        Raises:
            `ValueError`: if it is not a drafter that this package can run, or its weights are incomplete.
        """
        name = str(pretrained_model_name_or_path)
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        config, _ = PreTrainedConfig.get_config_dict(name, **hub)
        if not config:
            raise ValueError(f"{name!r} has no config.json: name the folder or the Hub repository of a drafter.")
        if config.get("model_type") in OUR_MODEL_TYPES:
            return AutoModel.from_pretrained(name, **kwargs)
        if num_target_layers is not None:
            config["num_target_layers"] = num_target_layers
        drafter_class, drafter_config = translate(config, name)
        # Only a drafter of this package's making carries over; one that was saved under z-lab's names says so by a
        # weight.
        drafter_config.carryover = "carry_embedding" in _weight_names(name, hub)
        drafter = drafter_class.from_pretrained(name, config=drafter_config, key_mapping=RENAMED_WEIGHTS, **kwargs)
        offsets = "speculators_model_type" in config or drafter_class is Eagle3Drafter
        if offsets and hasattr(drafter, "d2t"):
            drafter.d2t += torch.arange(len(drafter.d2t), device=drafter.d2t.device)  # saved as offsets from the index
        return drafter


def _weight_names(name: str, hub: dict) -> list[str]:
    path = cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False, **hub)
    if path is None:
        return []  # sharded: none of ours is that large
    with safe_open(path, framework="pt") as weights:
        return list(weights.keys())
