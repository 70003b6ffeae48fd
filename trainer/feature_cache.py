"""The target's features of a training set, kept in a file that is mapped into memory."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers.utils import logging

from .batch import Recorded
from .guest import GuestTarget
from .packing import PackedCollator

logger = logging.get_logger(__name__)


class FeatureCache:
    """
    What the target says of every token of packed sequences, computed once. Made on the first use of a folder; a folder
    that is complete is taken as it is.

    Args:
        folder (`Path`): Gets `features.bin` and, when that is complete, `features.json`.
        sequences (`Dataset`): From [`packed_dataset`].
        guest ([`GuestTarget`]).
        batch_size (`int`, *optional*, defaults to 8): Sequences that the target reads at once.

    Raises:
        `ValueError`: if the folder holds the features of other sequences or of another target.
    """

    def __init__(self, folder: Path, sequences: Dataset, guest: GuestTarget, batch_size: int = 8):
        tokens = list(sequences["input_ids"])
        self.starts = torch.tensor([0, *map(len, tokens)]).cumsum(0).tolist()
        self.hidden = guest.model.config.get_text_config(decoder=True).hidden_size
        self.width, self.dtype = (len(guest.layers) + 1) * self.hidden, guest.model.dtype
        count = self.starts[-1] * self.width
        made_of: dict[str, Any] = {
            "target": guest.model.config.name_or_path,
            "layers": [layer - 1 for layer in guest.layers],
            "dtype": str(self.dtype),
            "tokens": self.starts[-1],
            "sequences": hashlib.sha256(repr(tokens).encode()).hexdigest(),
        }
        file, note = folder / "features.bin", folder / "features.json"
        known = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
        if known not in (None, made_of):
            raise ValueError(f"`{folder}` holds other features, see {note.name} there: name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        size = count * self.dtype.itemsize
        logger.warning("Features of %d tokens: %.2f GB in %s.", self.starts[-1], size / 1e9, file)
        self.states = torch.from_file(str(file), shared=True, size=count, dtype=self.dtype).view(-1, self.width)
        if known is None:
            self._fill(sequences, guest, batch_size)
            note.write_text(json.dumps(made_of, indent=2) + "\n", encoding="utf-8")

    def _fill(self, sequences: Dataset, guest: GuestTarget, batch_size: int) -> None:
        collate = PackedCollator()
        for first in tqdm(range(0, len(sequences), batch_size), desc="features", disable=None):
            numbers = range(first, min(first + batch_size, len(sequences)))
            recorded, _ = guest.read(collate([sequences[number] for number in numbers]))
            states = torch.cat((recorded.features, recorded.final), dim=-1)
            for row, number in enumerate(numbers):
                start, stop = self.starts[number : number + 2]
                self.states[start:stop] = states[row, : stop - start]

    def read(self, inputs: dict[str, torch.Tensor]) -> Recorded:
        """
        Args:
            inputs (`dict`): From [`PackedCollator`], on the device of training.

        Returns:
            [`Recorded`], as [`GuestTarget.read`] gives it, but for zeros on padding.
        """
        tokens = inputs["input_ids"]
        states = torch.zeros(*tokens.shape, self.width, dtype=self.dtype)
        for row, number in enumerate(inputs["sequence"].tolist()):
            start, stop = self.starts[number : number + 2]
            states[row, : stop - start] = self.states[start:stop]
        features, final = states.to(tokens.device).split([self.width - self.hidden, self.hidden], dim=-1)
        loss_mask = inputs["loss_mask"].bool()
        return Recorded(tokens, loss_mask, inputs["document"], inputs["position"], features, final)
