"""A tiny model with random weights, made on the spot: the whole pipeline can be tried without downloading anything."""

from pathlib import Path
from typing import Any

from fp4pipe.convert.quiet import quiet
from fp4pipe.errors import SourceError

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_model(family: str, out: Path, *, seed: int = 0) -> None:
    """Write a two-layer bf16 model of `family` with a byte-level tokenizer and a chat template.

    Args:
        family: One of `FAMILIES`.
        out: Directory to write, in the Hugging Face layout.
        seed: Seed of the weights; the same seed gives the same bytes.

    Raises:
        SourceError: `family` is none of `FAMILIES`.
    """
    if family not in FAMILIES:
        raise SourceError(f"random:{family} cannot be made", fix="random:" + "|".join(FAMILIES))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _byte_tokenizer()
    config = AutoConfig.for_model(
        family,
        **_SHAPE,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with quiet():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _byte_tokenizer() -> Any:
    """One token a byte, and the three special tokens of the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=_SHAPE["max_position_embeddings"],
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
