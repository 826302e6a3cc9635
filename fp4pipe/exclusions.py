"""Does an exclude pattern of a quantization config mean this module?

Exporters and loaders write the same modules in different spellings, so one module has several names here:

- with and without the leading ``model.`` and ``language_model.`` that wrapping classes add;
- fused (``qkv_proj``) or as its shards (``q_proj``, ``k_proj``, ``v_proj``).

A pattern may be an exact name, a parent of the module (``vision_tower``), a glob over the whole name
(``model.layers.0.self_attn*``), a name or glob without dots that equals one component of the path (``lm_head``), or,
in compressed-tensors, ``re:`` and a regular expression matched from the start of the name.
"""

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import lru_cache

from fp4pipe.errors import CheckpointError

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
}
"""Projections that serving stacks join into one matrix, by the name of the joined one."""
_FUSED_OF = {shard: fused for fused, shards in FUSED.items() for shard in shards}
_WRAPPERS = ("model", "language_model")


def without_wrappers(name: str) -> str:
    """`name` without the leading ``model.`` / ``language_model.`` components; unchanged if nothing would be left."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def shards_of(module: str) -> tuple[str, ...]:
    """Names of the shards of a fused `module`, empty when its last component is no fused name."""
    parent, dot, leaf = module.rpartition(".")
    return tuple(f"{parent}{dot}{shard}" for shard in FUSED.get(leaf, ()))


def is_glob(pattern: str) -> bool:
    """Whether `pattern` holds a wildcard."""
    return any(wildcard in pattern for wildcard in "*?[")


def fused_of(module: str) -> str | None:
    """Name of the fused module that `module` is a shard of, or None."""
    parent, dot, leaf = module.rpartition(".")
    fused = _FUSED_OF.get(leaf)
    return fused and f"{parent}{dot}{fused}"


class Patterns:
    """A list of patterns, compiled once: checkpoints of mixture models ask for tens of thousands of modules.

    Args:
        patterns: As written in the config.

    Raises:
        CheckpointError: One of them is an invalid regular expression.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        names, globs, components = set[str](), set[str](), set[str]()
        regexes: list[re.Pattern[str]] = []
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                regexes.append(_regex(pattern))
                continue
            bare = without_wrappers(pattern)
            if not bare.strip("*."):
                bare = pattern  # `language_model.*` without its wrapper would exclude everything
            (globs if is_glob(pattern) else names).update((pattern, bare))
            if "." not in bare and bare not in _WRAPPERS:
                components.add(bare)
        self._names = names
        self._globs = _any_of(map(translate, globs))
        self._components = _any_of(map(translate, components))
        self._regexes = regexes

    def match(self, module: str) -> bool:
        """Whether any pattern means `module`, which is not taken apart or fused here."""
        spellings = {module, without_wrappers(module)}
        if any(name in self._names for spelling in spellings for name in _with_parents(spelling)):
            return True
        expressions = [self._globs, *self._regexes] if self._globs else self._regexes
        if any(expression.match(spelling) for expression in expressions for spelling in spellings):
            return True
        return bool(self._components) and any(
            self._components.match(part) for part in module.split(".") if part not in _WRAPPERS
        )


@lru_cache(maxsize=64)
def compiled(patterns: tuple[str, ...]) -> Patterns:
    """`Patterns(patterns)`, remembered."""
    return Patterns(patterns)


def is_excluded(module: str, patterns: tuple[str, ...]) -> bool:
    """Whether any of `patterns` means the linear `module`, by its own name, its fused name or those of its shards.

    Raises:
        CheckpointError: A fused module of which only some shards are excluded, or an invalid regular expression.
    """
    everything = compiled(patterns)
    if everything.match(module):
        return True
    if (fused := fused_of(module)) is not None:
        # Only patterns that spell the fused name: `*_proj` must not reach a shard by this road.
        leaf = fused.rpartition(".")[2]
        return compiled(tuple(pattern for pattern in patterns if leaf in pattern)).match(fused)
    shards = shards_of(module)
    excluded = [shard for shard in shards if everything.match(shard)]
    if excluded and len(excluded) < len(shards):
        raise CheckpointError(
            f"{module}: the exclude list names only part of this fused module",
            because=f"it names {', '.join(excluded)} of {', '.join(shards)}",
        )
    return bool(excluded)


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _any_of(expressions: Iterable[str]) -> re.Pattern[str] | None:
    alternatives = "|".join(expressions)
    return re.compile(alternatives) if alternatives else None


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise CheckpointError(f"exclude pattern {pattern} is no regular expression", because=str(error)) from error
