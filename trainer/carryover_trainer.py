"""A `transformers.Trainer` whose model is the drafter and whose target is a frozen guest."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, Trainer, TrainerControl
from transformers.utils import logging

from ..generation import CarryoverGenerationMixin, DraftStats, check_pair, check_target, disable, enable
from .acceptance_plot import AcceptancePlot
from .batch import Anchors, Labels, Recorded, sample_anchors, sample_stages
from .carryover_config import MODIFIERS, CarryoverTrainingArguments
from .feature_cache import FeatureCache
from .guest import GuestTarget
from .losses import exponential_weights, leading_run
from .objectives import DraftLoss
from .packing import PackedCollator, documents, pack, packed_dataset
from .repair import RepairPhase, mix_anchors
from .tally import Tally
from .verification import Carried, after_rejection, verify

logger = logging.get_logger(__name__)

DISAGREEMENT = 0.25  # of τ: answers may have been sampled, and a tie in bf16 changes what is said after it


def add_parts(drafter, objectives: list[str]):
    """Give a drafter the parts and settings that objectives train; those that it has stay as they are."""
    if "carryover" in objectives:
        drafter.add_carryover()
    if "loop" in objectives:
        drafter.add_looping()
    if "repair" in objectives:
        drafter.add_repair()


class CarryoverTrainer(Trainer):
    """
    Trains a drafter for a target.

    Args:
        model ([`Drafter`]): The drafter.
        target_model (`PreTrainedModel`): The target; frozen, never in a checkpoint and never in the optimizer.
        args ([`CarryoverTrainingArguments`]).
        train_dataset, eval_dataset (`Dataset` or iterable of rows):
            Rows with `input_ids` and `loss_mask`, or conversations in `messages` or `conversations`, which need the
            tokenizer as `processing_class`; see [`load_rows`]. Answers should be the target's own.
        peft_config (`PeftConfig`, *optional*):
            Train an adapter instead of the whole drafter; name small new parts in its `modules_to_save`, e.g.
            `["carry_embedding"]`.
        callbacks, kwargs: As for `Trainer`.

    Raises:
        `ValueError`: if target and drafter do not fit, or a set supervises no token.
    """

    control: TrainerControl

    def __init__(
        self,
        model,
        target_model: PreTrainedModel,
        args: CarryoverTrainingArguments,
        train_dataset=None,
        eval_dataset=None,
        peft_config=None,
        callbacks: list | None = None,
        **kwargs,
    ):
        check_target(target_model)
        check_pair(target_model, model)
        self.target_model = target_model.requires_grad_(False)
        add_parts(model, args.objectives)
        if args.train_selector_only:
            if peft_config is not None:
                raise ValueError(
                    "`train_selector_only` leaves the drafter as it is and `peft_config` adapts it: leave one out."
                )
            model.requires_grad_(False).selector.requires_grad_(True)
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        super().__init__(
            model=model,
            args=args,
            train_dataset=packed_dataset(train_dataset, args.max_length, kwargs.get("processing_class")),
            eval_dataset=packed_dataset(eval_dataset, args.max_length, kwargs.get("processing_class")),
            data_collator=PackedCollator(),
            callbacks=[AcceptancePlot(), *(callbacks or [])],
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides by the items of the whole accumulated batch
        if self.place_model_on_device:
            self.target_model.to(args.device)
        self.guest = GuestTarget(target_model, model.config.target_layer_ids)
        self.features = None
        if args.cached_features is not None:
            self.features = FeatureCache(Path(args.cached_features), self.train_dataset, self.guest)
        self.draft_loss = DraftLoss(
            drafter=model,
            forward=model,
            embedding=target_model.get_input_embeddings(),
            head=model.borrow(target_model.get_output_embeddings(), args.device, target_model.dtype),
            weights=args.position_weights,
            decay=args.loss_decay,
            anchors_per_chunk=args.anchors_per_chunk,
            loss_type=args.loss_type,
            guest=self.guest,
            through_looped=args.loop_gradient,
        )

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not given and "carryover" in self.args.objectives:
            self._set_carry_embedding_apart(optimizer)
        return optimizer

    def _set_carry_embedding_apart(self, optimizer: torch.optim.Optimizer):
        """Give it a learning rate on the scale of what it is added to."""
        recorded, _ = self.guest.read(self._prepare_inputs(PackedCollator()([self.train_dataset[0]])))
        median = self.accelerator.reduce(recorded.features.float().abs().median(), "mean").item()
        embedding = set(self.draft_loss.drafter.carry_embedding.parameters())
        for group in list(optimizer.param_groups):
            if apart := embedding.intersection(group["params"]):
                group["params"] = [parameter for parameter in group["params"] if parameter not in apart]
                changes = {"params": [*apart], "lr": self.args.carry_learning_rate * median, "weight_decay": 0.0}
                optimizer.add_param_group(group | changes)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        seeds = [hash((self.args.seed, self.state.global_step, int(i))) & 0x7FFFFFFF for i in inputs["sequence"]]
        self.draft_loss.forward = model
        self.draft_loss.base_share = 1 - self._progress
        self.draft_loss.repair = self._repair_phase
        counts = inputs["loss_mask"][:, 1:].sum(dim=1)
        share = counts / (counts.sum() if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            share = share * self.accelerator.num_processes
        with self.accelerator.autocast():
            loss = self._objective(inputs, seeds, share)
        return (loss, {}) if return_outputs else loss

    @property
    def _progress(self) -> float:
        """`float`: Share of all steps that are done."""
        return self.state.global_step / max(self.state.max_steps, 1)

    @property
    def _repair_phase(self) -> RepairPhase | None:
        return RepairPhase.of(self.args, self._progress) if "repair" in self.args.objectives else None

    def _after_rejection(self, recorded: Recorded, cache: DynamicCache, anchors: Anchors) -> tuple[Anchors, Carried]:
        against_target = self.args.verify_against == "target"
        return after_rejection(recorded, anchors, verify(self.draft_loss, recorded, cache, anchors, against_target))

    def _objective(self, inputs, seeds: list[int], share: torch.Tensor) -> torch.Tensor:
        """Mean loss of a block in each sequence, times the sequence's `share`, averaged over the objectives."""
        if self.features is None:
            recorded, cache = self.guest.read(inputs, keep_cache="carryover" in self.args.objectives)
        else:
            recorded, cache = self.features.read(inputs), None
        anchors = sample_anchors(recorded.eligible(), self.args.num_anchors, seeds)
        if (repair := self.draft_loss.repair) is not None:
            anchors = mix_anchors(self.draft_loss.draft, recorded, anchors, repair.boundaries)
        weights = exponential_weights(self.draft_loss.drafter.config.num_drafted, self.args.loss_decay).sum().item()
        looping = "loop" in self.args.objectives
        starts = [name for name in self.args.objectives if name not in MODIFIERS] or ["block"]
        losses = []
        for start in starts:
            carried = None
            if start == "carryover":
                anchors, carried = self._after_rejection(recorded, cache, anchors)
            stages = sample_stages(anchors, self.args.loop_stages, seeds) if looping else None
            blocks = anchors.valid.sum(dim=1).clamp(min=1) * weights * len(starts)
            losses.append(self.draft_loss(recorded, anchors, carried, share / blocks, stages)[0])
        return torch.stack(losses).sum()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self.args.fp16:  # there the scaler meets overflows on purpose
            self._refuse_non_finite(loss)
        return loss

    def _refuse_non_finite(self, loss: torch.Tensor):
        named = {"loss": loss}
        for name, parameter in self.draft_loss.drafter.named_parameters():
            named[name] = parameter
            if parameter.grad is not None:
                named[f"gradient of {name}"] = parameter.grad
        for name, tensor in named.items():
            if not tensor.detach().sum().isfinite():  # one pass, where `isfinite().all()` makes three
                raise FloatingPointError(
                    f"The {name} is no longer finite at step {self.state.global_step}: lower `learning_rate` or "
                    "`max_grad_norm`, or train with float32 weights and `bf16=True` instead of bfloat16 weights."
                )

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """
        Held-out acceptance: teacher-forced over evenly spread anchors, and by real `generate` on held-out prompts.

        Returns:
            `dict[str, float]` with, each behind `metric_key_prefix`: `tau`, `cross_entropy` and `accepted_at_<slot>`
            (the share of blocks accepted up to a slot) at recorded anchors; with a carryover drafter
            `tau_after_rejection` and
            `tau_after_rejection_no_carry` where a second round starts; with the objective `"loop"` `tau_second_block`,
            of the block behind the first one; with `"repair"` `tau_repaired`, all others being without it. On the
            prompts of `generate`: `generate_tau`, `generate_tau_no_carry`, `generate_tau_looped` and
            `generate_tau_repaired`, and `recorded_tau`, which is what `generate_tau_no_carry` should be if the
            recorded answers are what the target says.
        """
        started = time.perf_counter()
        dataset = self.eval_dataset
        if eval_dataset is not None:
            dataset = packed_dataset(eval_dataset, self.args.max_length, self.processing_class)
        self.draft_loss.repair = None
        tallies = self._tallies(dataset)
        metrics = {name: tally.metrics()["tau"] for name, tally in tallies.items()}
        metrics |= tallies["tau"].metrics()
        for slot, share in enumerate(metrics.pop("acceptance_by_position")):
            metrics[f"accepted_at_{slot + 1}"] = share
        if rows := documents(dataset, self.args.eval_generate_prompts):
            metrics["recorded_tau"] = self._recorded_tau(rows)
            metrics |= self._generate_tau([row["input_ids"][: row["loss_mask"].index(1)] for row in rows])
            self._warn_of_disagreement(metrics)
        metrics["seconds"] = time.perf_counter() - started
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _tallies(self, dataset: Dataset) -> dict[str, Tally]:
        model = self.draft_loss.forward = self.accelerator.unwrap_model(self.model)
        training = model.training
        model.eval()
        carryover = "carryover" in self.args.objectives
        tallies: dict[str, Tally] = {}
        for inputs in tqdm(self.get_eval_dataloader(dataset), desc="evaluate", leave=False, disable=None):
            inputs = self._prepare_inputs(inputs)
            with self.accelerator.autocast():
                recorded, cache = self.guest.read(inputs, keep_cache=carryover)
                anchors = sample_anchors(recorded.eligible(), self.args.num_anchors, seeds=None)
                counted = {"tau": self.draft_loss(recorded, anchors)[1]}
                if "loop" in self.args.objectives:
                    second = torch.full_like(anchors.index, 2)
                    counted["tau_second_block"] = self.draft_loss(recorded, anchors, stages=second)[1]
                if (phase := self._repair_phase) is not None:
                    counted["tau_repaired"] = replace(self.draft_loss, repair=phase)(recorded, anchors)[1]
                if carryover:
                    shifted, carried = self._after_rejection(recorded, cache, anchors)
                    shifted.valid = shifted.valid & carried.nonempty()
                    counted["tau_after_rejection"] = self.draft_loss(recorded, shifted, carried)[1]
                    counted["tau_after_rejection_no_carry"] = self.draft_loss(recorded, shifted)[1]
            for name, tally in counted.items():
                tallies[name] = tallies[name] + tally if name in tallies else tally
        model.train(training)
        return {
            name: tally.map(lambda value: self.accelerator.reduce(value, "sum")) for name, tally in tallies.items()
        }

    @torch.no_grad()
    def _recorded_tau(self, rows: list[dict[str, list[int]]]) -> float:
        """Acceptance length of rounds that follow each other over recorded answers, as those of `generate` would."""
        rounds = committed = 0
        for sequence in pack(rows, self.args.max_length):
            inputs = self._prepare_inputs(PackedCollator()([{**sequence, "sequence": 0}]))
            with self.accelerator.autocast():
                recorded, _ = self.guest.read(inputs, keep_cache=False)
                anchors = sample_anchors(recorded.eligible(), recorded.tokens.shape[1], seeds=None)
                labels = Labels.of(recorded, anchors, self.draft_loss.drafter.config.num_drafted)
                hit = self.draft_loss.draft(recorded, anchors) == labels.tokens
            accepted = dict(
                zip(anchors.index[0].tolist(), leading_run(hit, labels.supervised)[0].tolist(), strict=True)
            )
            for document in set(sequence["document"]):
                inside = [i for i in accepted if sequence["document"][i] == document and sequence["loss_mask"][i]]
                anchor = inside[0] if inside else -1  # an answer of one token has no round
                stop = anchor + self.args.eval_generate_tokens - 1
                while anchor in accepted and anchor < stop:
                    gained = min(accepted[anchor] + 1, stop - anchor)
                    rounds, committed, anchor = rounds + 1, committed + gained, anchor + gained
        return committed / max(rounds, 1)

    def _generate_tau(self, prompts: list[list[int]]) -> dict[str, float]:
        """Acceptance length of real greedy `generate`, pooled over the prompts."""
        drafter, target = self.accelerator.unwrap_model(self.model), self.target_model
        training, enabled = drafter.training, isinstance(target, CarryoverGenerationMixin)
        drafter.eval()
        enable(target)
        carryover, once = drafter.config.carryover, {"loop_threshold": None, "repair": False}
        settings = {"generate_tau": once | {"carryover": carryover}}
        if carryover:
            settings["generate_tau_no_carry"] = once | {"carryover": False}
        if drafter.config.looping:
            settings["generate_tau_looped"] = {"carryover": carryover, "repair": False}
        if drafter.config.repair:
            settings["generate_tau_repaired"] = once | {"carryover": carryover, "repair": True}
        totals = {name: DraftStats() for name in settings}
        for prompt in tqdm(prompts, desc="generate", leave=False, disable=None):
            for name, total in totals.items():
                target.generate(
                    torch.tensor([prompt], device=target.device),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=target.device),
                    assistant_model=drafter,
                    max_new_tokens=self.args.eval_generate_tokens,
                    do_sample=False,
                    **settings[name],
                )
                total.rounds += drafter.stats.rounds
                total.committed += drafter.stats.committed
        drafter.train(training)
        if not enabled:
            disable(target)
        return {name: total.acceptance_length for name, total in totals.items()}

    def _warn_of_disagreement(self, metrics: dict[str, float]):
        measured = metrics.get("generate_tau_no_carry", metrics["generate_tau"])
        if abs(measured - metrics["recorded_tau"]) > DISAGREEMENT * metrics["recorded_tau"]:
            logger.warning(
                "Teacher-forced acceptance length is %.2f but `generate` reaches %.2f: the drafter is trained on "
                "something else than it meets. Are the answers in the data the target's own, from the same chat "
                "template?",
                metrics["recorded_tau"],
                measured,
            )
