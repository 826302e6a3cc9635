"""Finding, reading and overriding recipe files.

Precedence, lowest first: schema defaults, the recipe file, `key=value` overrides in the order given.
Everything the schema does not know is refused, with the nearest known name or the value received.
"""

import difflib
import re
import reprlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from fp4pipe.errors import UsageError
from fp4pipe.recipe import Recipe, Section

SHIPPED = Path(__file__).parent / "recipes"
"""Directory of the recipes that come with the package."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring = 2, 80


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes that come with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe's name or of a path.

    Raises:
        UsageError: Neither a file nor a shipped name; says the nearest name.
    """
    shipped = shipped_recipes()
    path = Path(name_or_path)
    if name_or_path in shipped:
        return shipped[name_or_path]
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(f"recipe file {name_or_path} does not exist", fix="fp4pipe recipes list")
    raise UsageError(f"no recipe named {name_or_path!r}{_nearest(name_or_path, shipped)}", fix="fp4pipe recipes list")


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        name_or_path: Name of a shipped recipe, or a YAML file.
        overrides: `dotted.key=value`, the value written as YAML.

    Raises:
        UsageError: Not YAML, an unknown key, a value of the wrong type; one line for each.
    """
    path = find_recipe(name_or_path)
    data = _read_yaml(path)
    for override in overrides:
        _apply(data, override)
    data.setdefault("name", path.stem)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"recipe {path}: " + "\n  ".join(_problems(error))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path} is not YAML", because=" ".join(str(error).split())) from None
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read", because=error.strerror) from None
    if not isinstance(data, dict):
        raise UsageError(f"recipe {path} must be a mapping of keys", because=f"it holds {type(data).__name__}")
    return data


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key written twice in one mapping, where YAML would keep the last; `off` and `no` are words."""

    # As in YAML 1.2: 1.1 reads on, off, yes and no as booleans, and `load.graphs` may be `off`.
    yaml_implicit_resolvers = {  # noqa: RUF012  the base class's own
        first: [
            (tag, re.compile(r"(?:true|True|TRUE|false|False|FALSE)$") if tag == "tag:yaml.org,2002:bool" else pattern)
            for tag, pattern in resolvers
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in the raw mapping."""
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise UsageError(f"override {override!r} is not key=value", fix="write it like quantize.calibration.samples=64")
    try:
        bound = text.startswith((">", "<", "=", "!"))  # of a gate; YAML reads most of these signs otherwise
        value = text if bound else yaml.load(text, _StrictLoader)
    except yaml.YAMLError:
        raise UsageError(f"override {dotted}: {text!r} is not a YAML value", fix="quote it") from None
    *parents, last = dotted.split(".")
    for depth, key in enumerate(parents, start=1):
        if not isinstance(data.get(key), dict | None):
            raise UsageError(f"override {dotted}: {'.'.join(parents[:depth])} holds a value, not keys")
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
    data[last] = value


def _problems(error: ValidationError) -> list[str]:
    """One line for each problem: where, what, the nearest known key or the value received."""
    lines = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key{_nearest(str(problem['loc'][-1]), _keys_beside(problem['loc']))}")
        elif problem["type"] == "missing":
            lines.append(f"{where}: required")
        else:
            lines.append(f"{where}: {problem['msg']} (got {_SHORT.repr(problem['input'])})")
    return lines


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    """The keys the schema knows where `loc` points."""
    section: type[BaseModel] = Recipe
    for key in loc[:-1]:
        field = next((f for name, f in section.model_fields.items() if key in (name, f.alias)), None)
        if field is None:
            return []
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if not nested:
            return []
        section = nested[0]
    return [field.alias or name for name, field in section.model_fields.items()]


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else (f"; known: {', '.join(known)}" if known else "")
