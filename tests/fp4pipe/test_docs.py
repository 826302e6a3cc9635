"""The documentation says what the code does: commands parse, the key table is the schema, links lead somewhere."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from fp4pipe.recipe import Recipe

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Every `fp4pipe ...` and `make ...` line in a code block, comments left out."""
    for page in PAGES:
        blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        indented = re.findall(r"(?:^(?: {4}).*\n?)+", page.read_text(), re.MULTILINE)
        for block in (*blocks, *indented):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(fp4pipe|make) ", line):
                    yield page, shlex.split(line, comments=True)


FP4PIPE = [pytest.param(words, id=" ".join(words)) for _, words in commands() if words[0] == "fp4pipe"]
MAKE = [pytest.param(words, id=" ".join(words)) for _, words in commands() if words[0] == "make"]


@pytest.mark.parametrize("words", FP4PIPE)
def test_commands_in_the_docs_parse(words):
    """The parser is run up to the command's function: unknown options and missing arguments are errors."""
    from typer.main import get_command

    from fp4pipe.cli.entry import app

    with get_command(app).make_context("fp4pipe", words[1:]) as context:
        command, arguments = context.command, words[1:]
        while hasattr(command, "resolve_command"):
            _, command, arguments = command.resolve_command(context, arguments)  # type: ignore[attr-defined]
            assert command is not None
            if hasattr(command, "resolve_command"):
                continue
            command.make_context(words[-1], list(arguments), parent=context)


@pytest.mark.parametrize("words", MAKE)
def test_make_targets_in_the_docs_exist(words):
    targets = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    asked = [word for word in words[1:] if "=" not in word]
    assert asked
    assert set(asked) <= set(targets)


@pytest.mark.parametrize(
    "words", [p for p in FP4PIPE if p.values[0][1:3] == ["recipes", "check"] or p.values[0][1] == "run"]
)
def test_recipes_run_in_the_docs_check(cli, words, tmp_path, monkeypatch):
    from fp4pipe.recipe_file import load_recipe

    arguments = [word for word in words[2 if words[1] == "run" else 3 :] if not word.startswith("--")]
    monkeypatch.chdir(REPO)
    if arguments[0] == "mine.yaml":
        cli("recipes", "copy", "smollm2-135m", tmp_path / "mine.yaml")
        arguments[0] = str(tmp_path / "mine.yaml")
    load_recipe(arguments[0], arguments[1:])


def key_rows(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        nested = [
            k
            for k in (field.annotation, *get_args(field.annotation))
            if isinstance(k, type) and issubclass(k, BaseModel)
        ]
        if nested:
            yield from key_rows(nested[0], f"{key}.")
            continue
        assert field.description, f"{key} has no description"
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        choices = f" ({', '.join(_choices(field.annotation))})" if _choices(field.annotation) else ""
        yield f"| `{key}` | {default} | {field.description}{choices} |"


def _choices(annotation: Any) -> list[str]:
    inner = [annotation, *get_args(annotation)]
    return [f"`{value}`" for kind in inner if get_origin(kind) is Literal for value in get_args(kind)]


def test_the_key_table_is_the_schema():
    table = "\n".join(["| key | default | what |", "|---|---|---|", *key_rows()])
    assert table in (REPO / "docs/recipes.md").read_text(), f"docs/recipes.md should hold:\n\n{table}\n"


def test_links_lead_to_files():
    broken = [
        f"{page.relative_to(REPO)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_recipe_is_listed_in_the_docs():
    text = (REPO / "docs/recipes.md").read_text()
    assert all(f"`{path.stem}`" in text for path in (REPO / "recipes").glob("*.yaml"))
