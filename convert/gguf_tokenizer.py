"""The tokenizer of a GGUF model, built from its metadata so that it encodes exactly as the model's own.

Byte-level BPE (`tokenizer.ggml.model` `gpt2`): vocabulary and merges as stored, split as `tokenizer.ggml.pre` says.
SentencePiece BPE (`llama`): the file keeps a score for each piece and no merges; the merges are every way to put a
piece together from two others, the highest score first, which is the order SentencePiece itself follows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4pipe.convert.gguf_file import GGUFFile
from fp4pipe.convert.gguf_pretokenizers import Rule, build_pre_tokenizer, rule_of
from fp4pipe.errors import SourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Tokens that end a turn or a text in the families known; generation stops at each that a model has.
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<eos>",
    "</s>", "<EOT>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer and what surrounds it.

    Attributes:
        backend: The tokenizer proper.
        special: `bos_token`, `eos_token`, `pad_token`, `unk_token` to their text, as far as the model has them.
        add_bos, add_eos: Whether a text is encoded with bos before it, eos after it.
        ids: The same as `bos_token_id` and so on, without unk.
        end_ids: Every id that ends generation, eos first.
        chat_templates: Jinja templates by name; the main one is `default`.
    """

    backend: "Tokenizer"
    special: dict[str, str]
    add_bos: bool
    add_eos: bool
    ids: dict[str, int]
    end_ids: list[int]
    chat_templates: dict[str, str]

    def save(self, out: Path, *, max_length: int) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates into `out`."""
        import json

        self.backend.save(str(out / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        for name, template in self.chat_templates.items():
            path = out / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
            path.parent.mkdir(exist_ok=True)
            path.write_text(template, encoding="utf-8")


def build_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Build the tokenizer of a GGUF model.

    Raises:
        SourceError: its kind or pre-tokenizer is unknown, or its metadata is missing or inconsistent.
    """
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types = [int(kind) for kind in file.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise SourceError(f"{file.path.name}: {len(tokens)} tokens but {len(types)} token types")
    while types and types[-1] == UNUSED:  # rows that only pad the embedding matrix to a round number
        types.pop()
    vocab = {token: index for index, token in enumerate(tokens[: len(types)])}
    if len(vocab) != len(types):
        twice = next(token for index, token in enumerate(tokens[: len(types)]) if vocab[token] != index)
        raise SourceError(f"{file.path.name}: token {twice!r} appears twice in the vocabulary")

    kind = file.require("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = rule_of(file.get("tokenizer.ggml.pre"), file.path.name)
        backend, add_bos, drop_bos = _byte_level_bpe(file, vocab, rule), rule.add_bos, rule.bos_unused
        default_ids: dict[str, int] = {}
    elif kind == "llama":
        backend, add_bos, drop_bos = _sentencepiece_bpe(file, vocab, types), True, False
        default_ids = {"bos": 1, "eos": 2, "unk": 0}
    else:
        raise SourceError(
            f"{file.path.name}: tokenizer {kind!r} cannot be built (gpt2 and llama can)",
            fix="start from the model's Hugging Face directory",
        )
    ids = {name: _special_id(file, name, default_ids.get(name), len(vocab)) for name in ("bos", "eos", "pad", "unk")}
    ids = {name: index for name, index in ids.items() if index is not None}
    names = list(vocab)
    _add_special_tokens(file, backend, names, types, set(ids.values()))
    bos = names[ids["bos"]] if file.get("tokenizer.ggml.add_bos_token", add_bos) and "bos" in ids else None
    eos = names[ids["eos"]] if file.get("tokenizer.ggml.add_eos_token", False) and "eos" in ids else None
    _add_template(backend, vocab, bos, eos)
    return GGUFTokenizer(
        backend,
        special={f"{name}_token": names[index] for name, index in ids.items() if name != "bos" or bos or not drop_bos},
        add_bos=bos is not None,
        add_eos=eos is not None,
        ids={f"{name}_token_id": index for name, index in ids.items() if name != "unk"},
        end_ids=_end_ids(file, vocab, types, ids),
        chat_templates=_chat_templates(file),
    )


def _byte_level_bpe(file: GGUFFile, vocab: dict[str, int], rule: Rule) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models

    merges: list[tuple[str, str]] = []
    for index, line in enumerate(file.require("tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise SourceError(f"{file.path.name}: merge {index} {line!r} does not join two tokens into a third")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    normalizer, pre_tokenizer = build_pre_tokenizer(rule)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GGUFFile, vocab: dict[str, int], types: list[int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.require("tokenizer.ggml.scores")
    if len(scores) < len(types):
        raise SourceError(f"{file.path.name}: {len(types)} tokens but {len(scores)} scores")
    unknown = next((token for token, index in vocab.items() if types[index] == UNKNOWN), None)
    merges = _merges_by_score(vocab, types, scores)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(vocab: dict[str, int], types: list[int], scores: Any) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, best score first; ties go to the shorter left part.

    Control, byte and user-defined tokens take no part: text is never merged into them.
    """
    pieces = {token for token, index in vocab.items() if types[index] == NORMAL}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in pieces:
        index = vocab[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-float(scores[index]), index, cut, (left, right)))
    ranked.sort()
    return [pair for *_, pair in ranked]


def _special_id(file: GGUFFile, name: str, default: int | None, size: int) -> int | None:
    key = {"pad": "padding", "unk": "unknown"}.get(name, name)
    index = file.get(f"tokenizer.ggml.{key}_token_id", default)
    if index is None:
        return None
    if not 0 <= int(index) < size:
        raise SourceError(f"{file.path.name}: tokenizer.ggml.{key}_token_id is {index}, outside {size} tokens")
    return int(index)


def _add_special_tokens(
    file: GGUFFile, backend: "Tokenizer", names: list[str], types: list[int], named: set[int]
) -> None:
    from tokenizers import AddedToken

    # Phi-3's own tokenizer swallows the whitespace after its markers; metadata has no place to say so.
    phi3 = file.architecture == "phi3" and file.get("tokenizer.ggml.model") == "llama"
    added = []
    for index, (token, kind) in enumerate(zip(names, types, strict=True)):
        special = kind in (UNKNOWN, CONTROL) or index in named
        if special or kind == USER_DEFINED:
            rstrip = phi3 and special and token not in ("<unk>", "<s>", "<|endoftext|>")
            added.append(AddedToken(token, special=special, normalized=False, rstrip=rstrip))
    backend.add_tokens(added)


def _add_template(backend: "Tokenizer", vocab: dict[str, int], bos: str | None, eos: str | None) -> None:
    """Let the tokenizer put bos before a text and eos after it, as far as they are given."""
    from tokenizers import processors

    if bos is None and eos is None:
        return

    def wrap(name: str, kind: int) -> list[str]:
        return [f"{token}:{kind}" for token in (bos, f"${name}", eos) if token is not None]

    specials = [(token, vocab[token]) for token in dict.fromkeys((bos, eos)) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=wrap("A", 0), pair=[*wrap("A", 0), *wrap("B", 1)], special_tokens=specials
    )


def _end_ids(file: GGUFFile, vocab: dict[str, int], types: list[int], ids: dict[str, int]) -> list[int]:
    named = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    known = sorted(vocab[token] for token in END_TOKENS if token in vocab and vocab[token] != ids.get("unk"))
    known = [index for index in known if types[index] == CONTROL]
    first = [ids["eos"]] if "eos" in ids else []
    return list(dict.fromkeys([*first, *(int(index) for index in named if index is not None), *known]))


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(prefix + "."): text for key, text in file.metadata.items() if key.startswith(prefix + ".")
    }
    main = file.get(prefix)
    return named if main is None else {"default": main, **named}
