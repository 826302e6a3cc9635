"""Rules that hold the sizes in config.json against the tensors, as far as all decoders spell them alike."""

import re
from collections.abc import Iterator

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.lint.names import setting
from fp4pipe.lint.rules import Hit, rule

_LAYER = re.compile(r"^(?:model\.(?:language_model\.)?|language_model\.model\.)layers\.(\d+)\.")
_EMBEDDING = re.compile(r"^(?:model\.(?:language_model\.)?|language_model\.model\.)embed_tokens\.weight$")
_AGAIN = "download, copy or export the checkpoint again, with the config.json that belongs to it"


@rule("layers-missing", "error", "Every layer that the config counts has tensors.", fix=_AGAIN)
def layers_missing(checkpoint: Checkpoint) -> Iterator[Hit]:
    layers = setting(checkpoint, "num_hidden_layers")
    found = {int(match[1]) for name in checkpoint.tensors if (match := _LAYER.match(name))}
    if found and isinstance(layers, int) and (missing := set(range(layers)) - found):
        yield "config.json", f"{layers} layers, and no tensor of layer {min(missing)}"


@rule("layers-left-over", "warning", "No layer lies beyond those that the config counts.", fix=_AGAIN)
def layers_left_over(checkpoint: Checkpoint) -> Iterator[Hit]:
    """A warning only: some models keep draft layers there."""
    layers = setting(checkpoint, "num_hidden_layers")
    found = {int(match[1]) for name in checkpoint.tensors if (match := _LAYER.match(name))}
    if found and isinstance(layers, int) and max(found) >= layers:
        yield "config.json", f"{layers} layers, and tensors of layer {max(found)}"


@rule("embedding-shape", "error", "The token embeddings have the shape that the config gives.", fix=_AGAIN)
def embedding_shape(checkpoint: Checkpoint) -> Iterator[Hit]:
    wanted = (setting(checkpoint, "vocab_size"), setting(checkpoint, "hidden_size"))
    for name, info in checkpoint.tensors.items():
        if _EMBEDDING.match(name) and all(isinstance(size, int) for size in wanted) and info.shape != wanted:
            yield name, f"is {' x '.join(map(str, info.shape))}, and config.json says {wanted[0]} x {wanted[1]}"
