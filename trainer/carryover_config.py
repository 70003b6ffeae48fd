"""Arguments of [`CarryoverTrainer`], beside everything that `TrainingArguments` has."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .losses import POSITION_WEIGHTS
from .repair import REPAIR_WEIGHTS

OBJECTIVES = ("block", "carryover", "loop", "repair")
MODIFIERS = ("loop", "repair")  # go with the others, or with `"block"` if none is named
LOSS_TYPES = ("cross-entropy", "distillation", "dspark", "curriculum")
VERIFIERS = ("recorded", "target")


@dataclass
class CarryoverTrainingArguments(TrainingArguments):
    """
    > Parameters that control what is learned

    Args:
        objectives (`list[str]`, *optional*, defaults to `["block"]`):
            `"block"` drafts from recorded anchors; `"carryover"` drafts, verifies and drafts again with carried rows;
            `"loop"` drafts more blocks behind each of those, and `"repair"` trains a selector on all of them; these
            two go with the others, or with `"block"` if no other is named.
        num_anchors (`int`, *optional*, defaults to 512): Most blocks drafted from one packed sequence.
        anchors_per_chunk (`int`, *optional*, defaults to 128):
            Blocks in memory at a time: each chunk's gradient is taken before the next chunk begins. 32 is fast on a
            CPU.
        position_weights (`str`, *optional*, defaults to `"exponential"`): `"exponential"`, `"d-pace"` or `"vat"`.
        loss_decay (`float`, *optional*, defaults to 4.0): Positions over which the exponential weights fall by e.
        loss_type (`str`, *optional*, defaults to `"cross-entropy"`):
            `"cross-entropy"` learns the recorded tokens; `"distillation"` also the target's distribution over the
            draft vocabulary (arXiv 2608.30135); `"dspark"` the total variation to it and, with a confidence head, each
            slot's acceptance (arXiv 2607.05147); `"curriculum"` the recorded tokens, at first by the logits before
            a sequential head corrects them, at last by the corrected ones (arXiv 2605.29707).
        verify_against (`str`, *optional*, defaults to `"recorded"`):
            What the first draft of `"carryover"` is accepted by: the `"recorded"` tokens or the `"target"`'s own
            choice.
        carry_learning_rate (`float`, *optional*, defaults to 0.03):
            Initial learning rate of the carry embedding, in medians of the target's features, which it is added to.
            These are so large that at the rate of the weights carried rows would look like committed ones for
            hundreds of steps.
        loop_stages (`int`, *optional*, defaults to 3):
            Most blocks that `"loop"` drafts behind the first one, over the recorded tokens.
        loop_gradient (`bool`, *optional*, defaults to `True`):
            Whether gradients go through the states of a block that the blocks behind it read.
        train_selector_only (`bool`, *optional*, defaults to `False`):
            Whether `"repair"` leaves the drafter as it is and trains its selector alone.
        repair_alpha (`list[float]`, *optional*, defaults to `[0.05, 1.0]`):
            What the selector's loss counts beside the drafter's, at first and at last; 1 if it learns alone.
        repair_boundaries (`list[float]`, *optional*, defaults to `[0.3, 0.5]`):
            Share of the anchors, at first and at last, at which rounds of the present drafter would start.
        repair_weights (`str`, *optional*, defaults to `"prefix-value"`):
            How much a slot counts for the selector: `"prefix-value"` goes from uniform weights to what a right choice
            adds to the accepted length, `"uniform"` stays.
        repair_weight_floor (`float`, *optional*, defaults to 0.1): Share of these weights that stays uniform.
        repair_weight_cap (`float`, *optional*, defaults to 4.0): Most that a slot weighs; their mean is one.
        repair_ramp (`float`, *optional*, defaults to 0.5):
            Share of all steps in which the schedules of `"repair"` go, linearly, from their first to their last value.

    > Parameters that control the data

    Args:
        max_length (`int`, *optional*, defaults to 2048): Tokens of a packed sequence.
        cached_features (`str`, *optional*):
            Folder for the target's features of the training set, which are then computed once and not in every epoch.
            Its size is logged before it is filled. For the objective `"block"`: `"carryover"` lets the target judge.

    > Parameters that control the evaluation

    Args:
        eval_generate_prompts (`int`, *optional*, defaults to 8):
            Held-out prompts on which real `generate` is run at every evaluation; 0 leaves it out.
        eval_generate_tokens (`int`, *optional*, defaults to 64): New tokens for each of them.
    """

    objectives: list[str] = field(default_factory=lambda: ["block"], metadata={"help": "What is learned."})
    num_anchors: int = field(default=512, metadata={"help": "Most blocks drafted from one packed sequence."})
    anchors_per_chunk: int = field(default=128, metadata={"help": "Blocks in memory at a time."})
    position_weights: str = field(default="exponential", metadata={"help": "How much each drafted position counts."})
    loss_decay: float = field(default=4.0, metadata={"help": "Positions over which exponential weights fall by e."})
    loss_type: str = field(default="cross-entropy", metadata={"help": ", ".join(LOSS_TYPES)})
    verify_against: str = field(default="recorded", metadata={"help": "recorded tokens, or the target's choice."})
    carry_learning_rate: float = field(
        default=0.03, metadata={"help": "Of the carry embedding, relative to features."}
    )
    loop_stages: int = field(default=3, metadata={"help": "Most blocks drafted behind the first one."})
    loop_gradient: bool = field(default=True, metadata={"help": "Let gradients through the looped states."})
    train_selector_only: bool = field(default=False, metadata={"help": "Leave the drafter as it is."})
    repair_alpha: list[float] = field(
        default_factory=lambda: [0.05, 1.0], metadata={"help": "Weight of the selector's loss, at first and at last."}
    )
    repair_boundaries: list[float] = field(
        default_factory=lambda: [0.3, 0.5], metadata={"help": "Share of real anchors, at first and at last."}
    )
    repair_weights: str = field(default="prefix-value", metadata={"help": " or ".join(REPAIR_WEIGHTS)})
    repair_weight_floor: float = field(default=0.1, metadata={"help": "Share of the weights that stays uniform."})
    repair_weight_cap: float = field(default=4.0, metadata={"help": "Most that a slot weighs."})
    repair_ramp: float = field(default=0.5, metadata={"help": "Share of all steps until the last values."})
    max_length: int = field(default=2048, metadata={"help": "Tokens of a packed sequence."})
    cached_features: str | None = field(default=None, metadata={"help": "Folder to keep the target's features in."})
    eval_generate_prompts: int = field(default=8, metadata={"help": "Held-out prompts for real `generate`."})
    eval_generate_tokens: int = field(default=64, metadata={"help": "New tokens for each of them."})
    learning_rate: float = field(default=6e-4, metadata={"help": "The initial learning rate for AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "The scheduler type to use."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps, or below 1 a share of all steps."})
    logging_steps: float = field(default=10, metadata={"help": "Log every X updates steps."})

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.objectives if name not in OBJECTIVES]
        if unknown or not self.objectives:
            raise ValueError(f"`objectives` is {self.objectives}: name one or more of {', '.join(OBJECTIVES)}.")
        choices = {
            "position_weights": POSITION_WEIGHTS,
            "loss_type": LOSS_TYPES,
            "verify_against": VERIFIERS,
            "repair_weights": REPAIR_WEIGHTS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}: write one of {', '.join(allowed)}.")
        for name in ("num_anchors", "anchors_per_chunk", "loop_stages", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: write at least 1.")
        if self.cached_features is not None and "carryover" in self.objectives:
            raise ValueError(
                "`cached_features` spares the target, which the objective `carryover` needs in every step: leave it "
                "out."
            )
        if self.fp16 and self.num_anchors > self.anchors_per_chunk:
            raise ValueError(
                "`fp16` scales the loss, which comes too late for gradients that are taken chunk by chunk: write "
                "`bf16`, or an `anchors_per_chunk` of at least `num_anchors`."
            )
        for name, most in (("repair_alpha", math.inf), ("repair_boundaries", 1)):
            ends = getattr(self, name)
            if len(ends) != 2 or not all(0 <= end <= most for end in ends):
                raise ValueError(f"`{name}` is {ends}: write two numbers, at first and at last, from 0 to {most}.")
        for name in ("repair_weight_floor", "repair_ramp"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: write a share, from 0 to 1.")
        if self.repair_weight_cap < 1:
            raise ValueError(f"`repair_weight_cap` is {self.repair_weight_cap}: write at least 1, the weights' mean.")
        if self.train_selector_only and "repair" not in self.objectives:
            raise ValueError(
                f"`train_selector_only` is True and `objectives` is {self.objectives}: name `repair` among them, "
                "which is what trains a selector."
            )
        for name, unit in (("loss_decay", "positions"), ("carry_learning_rate", "medians of the features")):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: write a number of {unit} above 0.")
        # Rows carry their own columns, which the Trainer would otherwise drop as unknown to the drafter's `forward`.
        self.remove_unused_columns = False
