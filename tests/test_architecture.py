"""Imports run one way: the numeric core knows no framework, and importing the package costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl_dppo

PACKAGE = Path(verl_dppo.__file__).parent
CORE = [*(PACKAGE / "pruning").glob("*.py"), *(PACKAGE / "packing").glob("*.py")]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "." * node.level


@pytest.mark.parametrize("path", CORE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_core_imports_numpy_and_itself_only(path):
    allowed = {"numpy", "verl_dppo"} | set(sys.stdlib_module_names)
    for name in imports_of(path):
        assert name.split(".")[0] in allowed, name
        if name.startswith("verl_dppo"):
            assert name.split(".")[1] in ("pruning", "packing"), name


def test_only_training_cpu_and_cli_import_verl():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ("training", "cpu", "cli"):
            assert not {n.split(".")[0] for n in imports_of(path)} & {"verl", "ray", "torch", "tensordict"}, path


def test_training_does_not_import_the_rooms_above_it():
    for path in (PACKAGE / "training").glob("*.py"):
        assert not [n for n in imports_of(path) if n.startswith(("verl_dppo.cpu", "verl_dppo.cli"))], path


@pytest.mark.parametrize("module", ["verl_dppo", "verl_dppo.pruning", "verl_dppo.plugin", "verl_dppo.settings"])
def test_a_light_import_loads_no_framework(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'verl', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
