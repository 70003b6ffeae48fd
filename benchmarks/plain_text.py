"""
Plain English and Python for a drafter's cheap first phase, from what is installed anyway: docstrings and read-mes of
packages, and the standard library.

    python -m benchmarks.plain_text FOLDER
"""

import argparse
import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

BETWEEN = "\n\n\n"


def docstrings(file: Path) -> Iterator[str]:
    """Those of a module that are long enough to be prose."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 300:
                yield text


def collect() -> tuple[list[str], list[str]]:
    """Documentation and code, without repetitions; documentation that is mostly letters."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    documents: list[str] = []
    code: list[str] = []
    for file in sorted(packages.rglob("*.py")):
        if "test" not in str(file.relative_to(packages)):
            documents += docstrings(file)
    for file in sorted(library.rglob("*.py")):
        if any(part in str(file.relative_to(library)) for part in ("site-packages", "test", "idlelib", "encodings")):
            continue
        documents += docstrings(file)
        text = file.read_text(encoding="utf-8", errors="ignore")
        if 1_000 < len(text) < 60_000 and text.isascii():
            code.append(text)
    for pattern in ("METADATA", "*.md", "*.rst"):
        for file in sorted(packages.rglob(pattern)):
            documents.append(file.read_text(encoding="utf-8", errors="ignore").split("\n\n", 1)[-1][:20_000])
    readable = [text for text in documents if len(re.findall("[a-zA-Z ]", text)) > 0.85 * len(text)]
    return list(dict.fromkeys([*readable, *topics.values()])), code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documentation", type=int, default=4_200_000, help="characters at most")
    parser.add_argument("--code", type=int, default=1_200_000, help="characters at most")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    limits = {"documentation.txt": arguments.documentation, "code.txt": arguments.code}
    for (name, limit), texts in zip(limits.items(), collect(), strict=True):
        random.Random(0).shuffle(texts)
        file = arguments.folder / name
        file.write_text(BETWEEN.join(texts)[:limit], encoding="utf-8")
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
