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


_DEEPSEEK_V3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_DEEPSEEK_LLM_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄ"
    r"ῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


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
_DEEPSEEK_V3 = Rule((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3_WORDS))

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
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", "digits")),
    "deepseek-llm": Rule(
        (r"[\r\n]", _DEEPSEEK_LLM_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", "digits")
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
