"""The model card of a drafter: what it is, what to expect of it, and how it was trained."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .auto import AutoDrafter
from .suites import TITLES

TRAINING = "training.json"  # beside the weights: an entry for each run that the drafter has been through


def write_card(
    folder: str | Path,
    *,
    base_model: str,
    evaluation: Mapping[str, Any] | None = None,
    name: str | None = None,
    license: str = "apache-2.0",
    notes: str = "",
) -> Path:
    """
    Write `README.md` of a saved drafter.

    Args:
        folder (`str` or `Path`): Of the drafter; `training.json` in it, if there is one, is told in a table.
        base_model (`str`): Hub repository of the target.
        evaluation (`dict`, *optional*): What `hf-carryover evaluate --json` wrote.
        name (`str`, *optional*): Repository of the drafter; by default the folder's name.
        license (`str`, *optional*, defaults to `"apache-2.0"`).
        notes (`str`, *optional*): Markdown to end with.

    Returns:
        `Path`: The card.
    """
    folder = Path(folder)
    drafter = AutoDrafter.from_pretrained(folder)
    config = drafter.config
    name = name or folder.resolve().name
    runs = json.loads((folder / TRAINING).read_text(encoding="utf-8")) if (folder / TRAINING).exists() else []
    data = ModelCardData(
        library_name="transformers",
        license=license,
        base_model=base_model,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", config.model_type.removesuffix("_drafter")]
        + ["carryover"] * config.carryover
        + ["repair"] * config.repair,
        model_name=name,
        eval_results=_results(evaluation) if evaluation else None,
    )
    card = ModelCard.from_template(
        data,
        template_str=files("hf_carryover").joinpath("model_card.md.jinja").read_text(encoding="utf-8"),
        name=name,
        base_model=base_model,
        family=type(drafter).__name__.removesuffix("Drafter"),
        layers=config.num_hidden_layers,
        parameters=f"{drafter.num_parameters() / 1e6:.1f}",
        drafted=config.num_drafted,
        draft_vocabulary=config.draft_vocab_size and f"{config.draft_vocab_size:,}",
        carryover=config.carryover,
        selector=drafter.selector and f"{drafter.selector.num_parameters() / 1e6:.1f}",
        runs=runs,
        hours=sum(run["seconds"] for run in runs) / 3600,
        notes=notes.strip(),
        **(_table(evaluation) if evaluation else {}),
    )
    card.save(folder / "README.md")
    return folder / "README.md"


def _table(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    suites = list(evaluation["suites"])
    if len(suites) > 1:
        suites.append({"name": "mean", **evaluation["mean"]})
    drafting = [way["name"] for way in suites[0]["ways"] if "full_block_rate" in way["estimates"]]
    rows = []
    for suite in suites:
        told = {way["name"]: way["estimates"] for way in suite["ways"]}
        prompts = [len(way["counts"]) for way in suite["ways"] if "counts" in way]
        rows.append(
            {
                "title": _title(suite["name"]) + (f", {prompts[0]}" if prompts else ""),
                "taus": [_shown(told[name]["acceptance_length"]) for name in drafting],
                "speedup": _shown(told[drafting[0]].get("speedup")),
            }
        )
    device = {"cpu": "the CPU"}.get(evaluation["device"], evaluation["device"])
    return {
        "suites": rows,
        "measured_speed": any(row["speedup"] for row in rows),
        "ways": drafting,
        "new_tokens": evaluation["max_new_tokens"],
        "dtype": evaluation["dtype"],
        "device": f"{device} with {evaluation['threads']} thread{'s' if evaluation['threads'] != 1 else ''}",
    }


def _results(evaluation: Mapping[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite["source"] if suite["name"] in TITLES else "held-out",
            dataset_name=_title(suite["name"]),
            metric_type="acceptance_length",
            metric_name="acceptance length",
            metric_value=round(way["estimates"]["acceptance_length"]["value"], 3),
        )
        for suite in evaluation["suites"]
        for way in suite["ways"]
        if way["name"] == "drafter"
    ]


def _title(suite: str) -> str:
    return TITLES.get(suite, "mean" if suite == "mean" else "held-out")


def _shown(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return ""
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f}–{estimate['high']:.2f})"
