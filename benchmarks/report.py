"""What every benchmark writes beside its numbers: the machine, the date, the command and the versions."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
VERSIONS_OF = ("torch", "transformers")


def machine() -> str:
    """CPU model, cores and memory, and the GPU where there is one."""
    cpu = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    memory = psutil.virtual_memory().total / 2**30
    described = f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"
    return f"{described}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else described


def command() -> str:
    """The command line that started this benchmark, as a reader would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name] if spec else ["python", Path(sys.argv[0]).name]
    return shlex.join(program + sys.argv[1:])


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """A table with the keys of the first row as its head; floats with two decimals."""

    def line(cells) -> str:
        return "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"

    head = list(rows[0])
    return "\n".join(
        [line(head), line("---" for _ in head), *(line(row.get(key, "") for key in head) for row in rows)]
    )


def write_report(name: str, results: Any, text: str, folder: Path = RESULTS) -> Path:
    """
    Write `<name>.json` (everything measured) and `<name>.md` (what a reader wants first).

    Args:
        name (`str`): Of the benchmark; the stem of both files.
        results: Anything that `json` can write.
        text (`str`): Markdown under the title, e.g. one or more of [`markdown_table`].
        folder (`Path`, *optional*): Defaults to `benchmarks/results`.

    Returns:
        `Path`: Of the markdown file.
    """
    about = {
        "machine": machine(),
        "date": date.today().isoformat(),
        "command": command(),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in VERSIONS_OF},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(about | {"results": results}, indent=1, ensure_ascii=False) + "\n")
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    page = folder / f"{name}.md"
    page.write_text(
        f"# {name}\n\n{text.strip()}\n\n`{about['command']}` on {about['date']}; {about['machine']}; {versions}.\n"
    )
    return page
