"""How each `tokenizer.ggml.pre` splits text before byte-pair merging.

A GGUF file names the pre-tokenizer of a byte-level BPE model and nothing more; the rule behind the name is in the
model's own tokenizer.json. These are those rules; a digit split otherwise is another token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp4pipe.errors import SourceError

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_TAIL}"
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_TAIL}"
# Words split where case changes: capitals then small letters, or capitals alone.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(suffix: str, digits: str) -> str:
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{_UPPER}*{_LOWER}+{suffix}|{head}{_UPPER}+{_LOWER}*{suffix}"
    return f"{words}|{digits}|{_CASED_SYMBOLS}|{_TAIL}"


def _code_points(ranges: str) -> str:
    """A character class from hexadecimal code points and ranges."""
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in ranges.split()) + "]"


_DEEPSEEK_V3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
# Code points, in hex: expressions with the letters themselves break when a tool normalises this file.
_DEEPSEEK_LLM_LETTERS = _code_points(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_CJK = _code_points("4E00-9FA5 3040-309F 30A0-30FF")
_CJK_HANGUL = _code_points("4E00-9FA5 800-4E00 AC00-D7FF")
_WIDE_PUNCTUATION = _code_points("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")


@dataclass(frozen=True, slots=True)
class Rule:
    """One way of splitting.

    Attributes:
        splits: In order: an expression whose matches are set apart, or `digits` (each number character alone),
            `digit runs`, `punctuation runs`, `gpt-2` (GPT-2's own expression, and the step to bytes).
        ignore_merges: A piece that is a token is taken whole, whatever the merges say.
        add_bos: Whether the tokenizer begins a text with bos where the file does not say.
        nfc: Text is composed (Unicode NFC) first.
        bos_unused: The model's own tokenizer has no bos; the file names one only because the model's config does.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    bos_unused: bool = False


_GPT2 = Rule(("gpt-2",))
_DIGITS_GPT2 = Rule(("digits", "gpt-2"))
_LLAMA3 = Rule((_THREE_DIGITS,), ignore_merges=True, add_bos=True)
_QWEN2 = Rule((_ONE_DIGIT,), nfc=True, bos_unused=True)
_CL100K = Rule((_THREE_DIGITS,))
_GPT4O = Rule((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_DEEPSEEK_V3 = Rule((r"\p{N}{1,3}", f"{_CJK}+", _DEEPSEEK_V3_WORDS))

RULES: dict[str, Rule] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "trillion": _GPT2,
    "exaone4": _GPT2,
    "mpt": Rule(("gpt-2",), nfc=True),
    "olmo": Rule(("gpt-2",), nfc=True),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "command-r": Rule(("digits", "gpt-2"), nfc=True),
    "falcon": Rule(("punctuation runs", "gpt-2", "digit runs", "[0-9][0-9][0-9]")),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": Rule((_ONE_DIGIT,), nfc=True, add_bos=True),
    "megrez": _QWEN2,
    "stablelm2": Rule((_ONE_DIGIT,)),
    "hunyuan": Rule((_ONE_DIGIT,)),
    "seed-coder": Rule((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": Rule((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_CJK_HANGUL}+", "digits")),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LLM_LETTERS}+",
            rf"\s?{_WIDE_PUNCTUATION}+",
            r"\s+$",
            f"{_CJK_HANGUL}+",
            "digits",
        )
    ),
}


def rule_of(name: str | None, file_name: str) -> Rule:
    """The rule `tokenizer.ggml.pre` names.

    Raises:
        SourceError: it names none, or one that is not known; guessing would give other tokens than the model learned.
    """
    if name in RULES:
        return RULES[name]
    what = f"the unknown pre-tokenizer {name!r}" if name else "no pre-tokenizer (tokenizer.ggml.pre)"
    raise SourceError(
        f"{file_name} names {what}",
        because=f"how it splits text cannot be known; known are: {', '.join(sorted(RULES))}",
        fix="a newer GGUF of the model, or its Hugging Face directory",
    )


def build_pre_tokenizer(rule: Rule) -> "tuple[Normalizer | None, PreTokenizer]":
    """The `tokenizers` components of a rule; the last step always turns text into byte symbols."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = []
    for split in rule.splits:
        if split == "gpt-2":
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
        elif split in ("digits", "digit runs"):
            steps.append(pre_tokenizers.Digits(individual_digits=split == "digits"))
        elif split == "punctuation runs":
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        else:
            steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    if "gpt-2" not in rule.splits:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return normalizers.NFC() if rule.nfc else None, pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
