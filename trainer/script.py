"""A training run from a YAML file or flags: what `hf-carryover train` does."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import concatenate_datasets
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..modeling import DRAFTERS, Drafter
from .carryover_config import CarryoverTrainingArguments
from .carryover_trainer import CarryoverTrainer, add_parts
from .data import hold_out, load_rows, recorded_text
from .initialise import initialise_from_target, most_frequent_tokens
from .training_record import write_training

SMALL_PARTS = ("carry_embedding", "markov_head", "confidence_head", "prefix_gru", "embed_proj", "selector")
FAMILIES = {drafter.config_class.model_type.removesuffix("_drafter"): drafter.config_class for drafter in DRAFTERS}


@dataclass
class RunArguments:
    """
    > Parameters that control what is trained on what

    Args:
        target (`str`): Folder or Hub repository of the target.
        data (`list[str]`): Folders or files of rows, e.g. from `hf-carryover synthesize`; one prompt in 32 is held
            out.
        texts (`list[str]`, *optional*): Files of plain text to learn from as well; see [`recorded_text`].
        drafter (`str`, *optional*): Trained drafter to go on from; a new one by default.

    > Parameters that control a new drafter

    Args:
        family (`str`, *optional*, defaults to `"dflash"`):
            `"dflash"`, `"dspark"`, `"domino"`, `"eagle3"` or `"mtp"`.
        mask_token_id (`int`, *optional*): An unused row of the target's embedding; the first three need it.
        num_hidden_layers (`int`, *optional*): Layers; 3 by default, and always 1 in the last two.
        block_size (`int`, *optional*):
            Slots of a block; 8 by default, 7 for `"eagle3"` and 3 for `"mtp"`. With `drafter`, its size from now on.
        draft_vocab_size (`int`, *optional*): Draft only the tokens that are most frequent in the data.
        qk_norm (`bool`, *optional*):
            Whether queries and keys are normalised per head; by default they are in the first three families.
        from_target_layers (`bool`, *optional*, defaults to `True`): Start from the target's last layers.

    > Parameters that control an adapter

    Args:
        lora_rank (`int`, *optional*, defaults to 0): Train a LoRA adapter of this rank instead of the whole drafter.
    """

    target: str = field(metadata={"help": "Folder or Hub repository of the target."})
    data: list[str] = field(metadata={"help": "Folders or files of rows."})
    texts: list[str] = field(default_factory=list, metadata={"help": "Files of plain text to learn from as well."})
    drafter: str | None = field(default=None, metadata={"help": "Trained drafter to go on from."})
    family: str = field(default="dflash", metadata={"help": "Family of a new drafter.", "choices": [*FAMILIES]})
    mask_token_id: int | None = field(default=None, metadata={"help": "An unused row of the target's embedding."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers of a new drafter."})
    block_size: int | None = field(default=None, metadata={"help": "Slots of a block."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Draft only the most frequent tokens."})
    qk_norm: bool | None = field(default=None, metadata={"help": "Normalise queries and keys per head."})
    from_target_layers: bool = field(default=True, metadata={"help": "Start from the target's last layers."})
    lora_rank: int = field(default=0, metadata={"help": "Train a LoRA adapter of this rank."})


def run(arguments: RunArguments, training: CarryoverTrainingArguments, load_drafter) -> CarryoverTrainer:
    """
    Train, evaluate at the end and save to `training.output_dir`.

    Args:
        arguments ([`RunArguments`]), training ([`CarryoverTrainingArguments`]).
        load_drafter (`Callable`): From a folder or repository to a [`Drafter`], for `arguments.drafter`.

    Raises:
        `ValueError`: if the arguments do not fit each other, the target or the data.
    """
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype)
    rows, held_out_rows = hold_out(load_rows(arguments.data, tokenizer))
    if not len(held_out_rows):
        raise ValueError(f"`data` {arguments.data} holds no held-out prompt, which one in 32 is: take more rows.")
    if arguments.texts:
        texts = recorded_text([Path(file) for file in arguments.texts], tokenizer, training.max_length)
        rows = concatenate_datasets([rows, texts])
    if arguments.drafter:
        drafter = load_drafter(arguments.drafter)
        if arguments.block_size is not None:
            drafter.resize_block(arguments.block_size)
    else:
        drafter = new_drafter(arguments, target, rows)
    add_parts(drafter, training.objectives)  # before an adapter is laid over it
    trainer = CarryoverTrainer(
        model=drafter.float(),  # master weights; `bf16` computes in bfloat16 all the same
        target_model=target,
        args=training,
        train_dataset=rows,
        eval_dataset=held_out_rows,
        processing_class=tokenizer,
        peft_config=adapter(drafter, arguments.lora_rank) if arguments.lora_rank else None,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())
    write_training(trainer, arguments.drafter, arguments.data, arguments.texts)
    return trainer


def new_drafter(arguments: RunArguments, target: PreTrainedModel, rows) -> Drafter:
    """A drafter with the weights it starts from."""
    kept = None
    if arguments.draft_vocab_size:
        kept = most_frequent_tokens(rows, arguments.draft_vocab_size)
    names = ("num_hidden_layers", "block_size", "mask_token_id", "qk_norm")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = FAMILIES[arguments.family].from_target(target.config, draft_vocab_size=kept and len(kept), **given)
    drafter = AutoModel.from_config(config)
    if kept:
        drafter.d2t.copy_(torch.tensor(kept))
    if arguments.from_target_layers:
        initialise_from_target(drafter, target)
    return drafter


def adapter(drafter: Drafter, rank: int):
    """`LoraConfig` on every projection of the drafter; its small new parts are trained whole."""
    from peft import LoraConfig

    small = [name for name in SMALL_PARTS if getattr(drafter, name, None)]
    return LoraConfig(r=rank, target_modules=r".*(_proj|fc)", modules_to_save=small or None)
