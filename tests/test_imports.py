"""Who may import whom (docs/architecture.md), and that every package imported is a declared dependency."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("fp4pipe", "calib_data", "convert", "runtime")

# Inside runtime, imports point to the same number or a lower one. A new top-level module there needs a line here.
LAYER = {
    "bench": 5,
    "validate": 5,
    "serve": 4,
    "engine": 3,
    "graph": 2,
    "model": 1,
    "fill": 1,
    "build": 1,
    "attention": 0,
    "attention_plan": 0,
    "batch": 0,
    "cache": 0,
    "ops": 0,
    "weights": 0,
}
HEAVY = {"torch", "transformers", "modelopt", "numpy", "scipy", "datasets", "fastapi", "uvicorn", "huggingface_hub"}
OPTIONAL = {"flashinfer", "triton"}
"""Packages of the `cuda` extra, imported only where a GPU is."""


def module_of(path: Path) -> str:
    """Dotted name a file is imported by."""
    parts = path.relative_to(REPO).with_suffix("").parts
    parts = parts if parts[0] == "fp4pipe" else ("fp4pipe", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (REPO / room).rglob("*.py") if not _through_link(path))


def _through_link(path: Path) -> bool:
    return any((REPO / parent).is_symlink() for parent in path.relative_to(REPO).parents)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it runs when the file is imported) of every import statement."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in deferred
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, from fp4pipe"
            for name in node.names:  # `from fp4pipe.runtime import engine` imports the module engine
                yield f"{node.module}.{name.name}", node.lineno, id(node) not in deferred


def room_of(module: str) -> str:
    """`convert`, `runtime`, `calib_data`, `cli`, or `shared`."""
    part = [*module.split("."), ""][1]
    return part if part in ("convert", "runtime", "calib_data", "cli") else "shared"


ALLOWED = {
    "shared": {"shared"},
    "calib_data": {"shared", "calib_data"},
    "convert": {"shared", "calib_data", "convert"},
    "runtime": {"shared", "runtime"},
    "cli": {"shared", "calib_data", "convert", "runtime", "cli"},
}


def test_rooms_import_only_what_they_may():
    wrong = [
        f"{path.relative_to(REPO)}:{line}: {room_of(module_of(path))} imports {target}"
        for path in source_files()
        for target, line, _ in imports(path)
        if target.split(".")[0] == "fp4pipe"
        and room_of(target) not in ALLOWED[room_of(module_of(path))]
        and path != REPO / "fp4pipe/__main__.py"  # which is the command
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_imports_point_down():
    wrong = []
    for path in (REPO / "runtime").rglob("*.py"):
        here = module_of(path).split(".")[2:]
        for target, line, _ in imports(path):
            there = target.split(".")
            if not here or there[:2] != ["fp4pipe", "runtime"] or len(there) < 3:
                continue
            assert {there[2], here[0]} <= LAYER.keys(), f"{path}: give {there[2]} and {here[0]} a line in LAYER"
            if LAYER[there[2]] > LAYER[here[0]]:
                wrong.append(f"{path.relative_to(REPO)}:{line}: {here[0]} imports {there[2]}, which lies above it")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_imported_inside_functions_where_help_passes():
    light = [
        *(REPO / "fp4pipe/cli").rglob("*.py"),
        *(REPO / "fp4pipe" / f"{m}.py" for m in ("__init__", "console", "errors")),
    ]
    rooms = ("fp4pipe.convert", "fp4pipe.runtime", "fp4pipe.calib_data", "fp4pipe.recipe")
    wrong = [
        f"{path.relative_to(REPO)}:{line}: imports {target} when it is imported itself"
        for path in light
        for target, line, at_import in imports(path)
        if at_import and (target.split(".")[0] in HEAVY or target.startswith(rooms))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_imported_package_is_a_declared_dependency():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared = {_canonical(re.split(r"[^\w.-]", text)[0]) for text in project["dependencies"]}
    distributions = metadata.packages_distributions()
    imported = {target.split(".")[0] for path in source_files() for target, _, _ in imports(path)}
    third_party = imported - set(sys.stdlib_module_names) - {"fp4pipe"} - OPTIONAL
    missing = {name for name in third_party if not declared & {_canonical(d) for d in distributions.get(name, [name])}}
    assert not missing, f"imported but not in [project] dependencies: {sorted(missing)}"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("room", ["convert", "runtime", "calib_data", "recipes"])
def test_the_rooms_are_linked_into_the_package(room):
    link = REPO / "fp4pipe" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
