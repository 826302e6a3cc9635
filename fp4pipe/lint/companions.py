"""Rules about what must lie beside the tensors: metadata, index totals, tokenizer, templates, code."""

import json
from collections.abc import Iterator
from typing import Any

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.errors import CheckpointError
from fp4pipe.lint.rules import Hit, rule
from fp4pipe.quant_config import read_json
from fp4pipe.shards import INDEX

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@rule(
    "metadata-format",
    "warning",
    'Every file carries the metadata {"format": "pt"}.',
    fix="save the file again with that metadata: transformers refuses files without it",
)
def metadata_format(checkpoint: Checkpoint) -> Iterator[Hit]:
    for file, metadata in checkpoint.metadata.items():
        if metadata.get("format") != "pt":
            yield file.name, f"metadata is {json.dumps(metadata)}"


@rule(
    "index-total-size",
    "warning",
    "The index states the bytes of all tensors.",
    fix="correct metadata.total_size in the index: loaders size their memory by it",
)
def index_total_size(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.shards.index is None:
        return
    metadata = checkpoint.shards.index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    if stated != total:
        yield INDEX, f"total_size is {stated}, the tensors have {total} bytes"


@rule(
    "tokenizer-absent",
    "warning",
    "The tokenizer is part of the checkpoint.",
    fix="copy the tokenizer's files from the source model",
)
def tokenizer_absent(checkpoint: Checkpoint) -> Iterator[Hit]:
    if not any((checkpoint.path / name).exists() for name in _TOKENIZERS):
        yield checkpoint.path.name, f"none of {', '.join(_TOKENIZERS)}"


@rule(
    "chat-template-absent",
    "info",
    "The checkpoint has a chat template.",
    fix="copy chat_template.jinja from the source model, if it has one",
)
def chat_template_absent(checkpoint: Checkpoint) -> Iterator[Hit]:
    in_config = _json(checkpoint, "tokenizer_config.json").get("chat_template")
    if not in_config and not any((checkpoint.path / name).exists() for name in _TEMPLATES):
        yield checkpoint.path.name, "no chat template file, and none in tokenizer_config.json"


@rule(
    "generation-config-absent",
    "info",
    "The checkpoint has a generation config.",
    fix="copy generation_config.json from the source model: it may name more end-of-text tokens than config.json",
)
def generation_config_absent(checkpoint: Checkpoint) -> Iterator[Hit]:
    if not (checkpoint.path / "generation_config.json").exists():
        yield checkpoint.path.name, "no generation_config.json"


@rule(
    "companion-invalid",
    "error",
    "The JSON files beside the weights can be read.",
    fix="copy the file from the source model again",
)
def companion_invalid(checkpoint: Checkpoint) -> Iterator[Hit]:
    for name in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        path = checkpoint.path / name
        try:
            if path.exists():
                read_json(path)
        except CheckpointError as error:
            yield name, str(error)


@rule(
    "auto-map-target",
    "error",
    "Every class that auto_map names comes with its Python file.",
    fix="copy the file from the source model, or remove auto_map if transformers has the class",
)
def auto_map_target(checkpoint: Checkpoint) -> Iterator[Hit]:
    for name, document in (
        ("config.json", checkpoint.config),
        ("tokenizer_config.json", _json(checkpoint, "tokenizer_config.json")),
    ):
        auto_map = document.get("auto_map")
        for target in _strings(auto_map):
            # `owner/repository--module.Class` is fetched from another repository.
            module = target.rpartition(".")[0]
            if "--" not in target and module and not (checkpoint.path / f"{module}.py").exists():
                yield name, f"auto_map names {target}, and there is no {module}.py"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The JSON object in the file `name`, empty when it is missing or unreadable (a rule of its own says so)."""
    try:
        return read_json(checkpoint.path / name)
    except CheckpointError:
        return {}
