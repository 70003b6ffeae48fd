"""Loading and saving a drafter: nothing missing, nothing left over, and its drafting settings beside the weights."""

from transformers import GenerationConfig, PreTrainedModel


class StrictlyLoaded(PreTrainedModel):
    """A model with a `generation_config` of its own that would rather not load than load in part."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """
        As `PreTrainedModel.from_pretrained`, but a weight that is missing, left over or of another shape is an error.

        Raises:
            `ValueError`: naming the weights, or the foreign format of the folder.
        """
        # Mismatches are reported instead of raised, so that one sentence names all faults.
        reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        drafter, report = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs, **reported)
        faults = {
            name: sorted(map(str, report[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        if any(faults.values()):
            told = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys)}" for name, keys in faults.items() if keys)
            raise ValueError(
                f"The weights in {pretrained_model_name_or_path!r} are not those of a {cls.__name__} ({told}). Load "
                "another tool's checkpoint with `hf_carryover.AutoDrafter.from_pretrained`."
            )
        hub_kwargs = {k: kwargs[k] for k in ("cache_dir", "revision", "token", "subfolder") if k in kwargs}
        try:
            saved = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        except OSError:
            pass  # no generation_config.json: the settings that the configuration implies
        else:
            drafter.generation_config = saved
        return (drafter, report) if output_loading_info else drafter

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As `PreTrainedModel.save_pretrained`, with the drafting settings beside the weights."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self.generation_config.save_pretrained(save_directory)
