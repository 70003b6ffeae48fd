"""What a drafter has been through: `training.json` beside its weights, one entry for each run, for the model card."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from .carryover_trainer import CarryoverTrainer

FILE = "training.json"


def write_training(trainer: CarryoverTrainer, started_from: str | None, data: list[str], texts: list[str]) -> Path:
    """
    Write `training.json` to the output folder of a trainer that has trained.

    Args:
        trainer ([`CarryoverTrainer`]).
        started_from (`str`, *optional*): Folder of the drafter that this run began with, whose entries come first.
        data, texts (`list[str]`): Names of what was learned from.

    Returns:
        `Path`: The file.
    """
    args, logs = trainer.args, trainer.state.log_history
    supervised = sum(sum(mask) for mask in trainer.train_dataset["loss_mask"])
    entry: dict[str, Any] = {
        "objectives": args.objectives,
        "loss_type": args.loss_type,
        "data": ", ".join(Path(name).name for name in data) + (" and plain text" if texts else ""),
        "sequences": len(trainer.train_dataset),
        "supervised_tokens": supervised,
        "steps": trainer.state.global_step,
        "epochs": round(trainer.state.epoch or 0, 2),
        "sequences_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "learning_rate": args.learning_rate,
        "seconds": round(sum(log.get("train_runtime", 0) for log in logs)),
        "held_out_tau": next((log["eval_tau"] for log in reversed(logs) if "eval_tau" in log), None),
        "machine": f"{args.device.type}, {os.cpu_count()} {platform.machine()} cores",
    }
    before = Path(started_from) / FILE if started_from else None
    runs = json.loads(before.read_text(encoding="utf-8")) if before and before.exists() else []
    file = Path(args.output_dir) / FILE
    file.write_text(json.dumps([*runs, entry], indent=2) + "\n", encoding="utf-8")
    return file
