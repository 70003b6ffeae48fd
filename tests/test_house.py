"""The arrows between the folders run one way, and what travels to the Hub stands alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "modeling": set(),
    "generation": {"modeling"},
    "trainer": {"generation", "modeling"},
}


def imported_modules(file: Path) -> set[str]:
    """Modules that `file` imports, in full; relative ones are resolved as in the installed package."""
    package = ("hf_carryover", *file.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*anchor, *([node.module] if node.module else [])])
            # `from package import name` may import a module, too
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "hf_carryover" else {module}
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    allowed = {folder} | MAY_IMPORT[folder]
    for file in (ROOT / folder).rglob("*.py"):
        ours = {name.split(".")[1] for name in imported_modules(file) if name.startswith("hf_carryover.")}
        assert ours <= allowed, (
            f"{file.relative_to(ROOT)} imports hf_carryover.{', hf_carryover.'.join(ours - allowed)}"
        )


def test_modeling_is_flat():
    """Its files are copied beside the weights, where only `from .sibling import name` resolves."""
    folder = ROOT / "modeling"
    assert list(folder.rglob("*.py")) == list(folder.glob("*.py"))
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, f"{file.name}:{node.lineno} leaves the folder"
                assert node.module, f"{file.name}:{node.lineno} names no sibling"
                assert "." not in node.module, f"{file.name}:{node.lineno} is not flat"
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not any(name.split(".")[0] == "hf_carryover" for name in names), f"{file.name}:{node.lineno}"
