"""Where training rows come from, who may see whom, what is learned, and the Trainer."""

from .carryover_config import CarryoverTrainingArguments
from .carryover_trainer import CarryoverTrainer

__all__ = ["CarryoverTrainer", "CarryoverTrainingArguments"]
