"""What a checkpoint says about generation: the tokens that end it and its makers' sampling defaults."""

import json
from pathlib import Path
from typing import Any

from fp4pipe.errors import CheckpointError

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_config(path: Path) -> dict[str, Any]:
    """The contents of `generation_config.json`; empty when there is none.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    file = path / "generation_config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON", because=str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return config


def eos_ids(generation: dict[str, Any], config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a sequence: the generation config's, else the model config's, else the tokenizer's."""
    for value in (generation.get("eos_token_id"), getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (value,)
    return ()


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that the generation config sets, by their names in `SamplingParams`."""
    return {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
