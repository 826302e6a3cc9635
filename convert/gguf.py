"""A GGUF model as a Hugging Face directory: bf16 weights, configs, and the tokenizer exactly as the model's own."""

import json
from pathlib import Path

from fp4pipe.convert.gguf_config import build_config, family_of
from fp4pipe.convert.gguf_file import GGUFFile
from fp4pipe.convert.gguf_tokenizer import GGUFTokenizer, build_tokenizer
from fp4pipe.convert.gguf_weights import head_is_tied, match_tensors, write_weights
from fp4pipe.convert.staging import staged
from fp4pipe.errors import SourceError

# Sampling a GGUF file may recommend, as generation_config.json spells it.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_to_hf(gguf: Path, out: Path) -> None:
    """Convert `gguf` into the Hugging Face directory `out`, which appears whole or not at all.

    Quantized weights are dequantized in float32 and rounded once, to bf16; about 4 GiB of memory suffice for any size.

    Args:
        gguf: The file; of a split model, its first part.
        out: Directory to create; it may exist only if it is empty.

    Raises:
        SourceError: The file is damaged or no GGUF, or its architecture, tokenizer or tensors cannot be converted.
        UsageError: `out` holds something.
    """
    gguf, out = Path(gguf), Path(out)
    if not gguf.is_file():
        raise SourceError(f"{gguf}: no such file")
    file = GGUFFile(gguf)
    family = family_of(file)
    tokenizer = build_tokenizer(file)
    # Ids the model lacks are said to be absent, for a config class may have defaults of another vocabulary.
    token_ids = {key: tokenizer.ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = build_config(file, tied=head_is_tied(file), token_ids=token_ids)
    largest = tokenizer.backend.get_vocab_size()
    if largest > config.vocab_size:
        raise SourceError(f"{gguf.name}: {largest} tokens but only {config.vocab_size} rows in token_embd.weight")
    pairs = match_tensors(file, config)
    with staged(out) as staging:
        write_weights(file, config, family, pairs, staging)
        config.save_pretrained(staging)
        tokenizer.save(staging, max_length=config.max_position_embeddings)
        _write_generation_config(file, tokenizer, staging)


def _write_generation_config(file: GGUFFile, tokenizer: GGUFTokenizer, out: Path) -> None:
    settings: dict[str, object] = dict(tokenizer.ids)
    if tokenizer.end_ids:
        settings["eos_token_id"] = tokenizer.end_ids if len(tokenizer.end_ids) > 1 else tokenizer.end_ids[0]
    advised = {name: file.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    advised = {name: value for name, value in advised.items() if value is not None}
    if advised:
        settings |= {"do_sample": True, **advised}
    (out / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
