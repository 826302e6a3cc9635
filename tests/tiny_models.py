"""Tiny random checkpoints with a real tokenizer: small enough for a test, complete enough for the whole pipeline.

make_tiny("llama", tmp_path / "llama")                     # saves and returns the directory
@pytest.mark.parametrize("family", FAMILIES)
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
SPECIAL = ("<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the river runs past the old stone bridge.",
    "A matrix of weights is stored as four-bit codes, and every block of sixteen columns shares one scale.",
    "If Anna has 12 apples and gives 5 of them to Tom, she keeps 12 - 5 = 7 apples for herself.",
    "def add(left, right):\n    return left + right\n\nprint(add(2, 3))  # prints 5\n",
    "Le petit chat dort sur la chaise près de la fenêtre; der kleine Hund läuft durch den Garten.",
    '"Where are you going?" she asked. "To the market," he said, "to buy bread, cheese and some wine."',
    "In the year 1969 the first people walked on the moon, about 384400 kilometres away from the earth.",
    "Water boils at one hundred degrees at sea level, but on a high mountain it boils at a lower temperature.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What makes each family worth a test; everything else is _COMMON. `sliding_window` is short so that prompts exceed it.
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False},
    "mistral": {"head_dim": 16, "sliding_window": 24, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "phi3": {"original_max_position_embeddings": 512, "tie_word_embeddings": False},
}
FAMILIES = tuple(_SPECIFIC)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `VOCAB` tokens trained on `SENTENCES`, with special tokens and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny(
    family: str,
    path: Path,
    *,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Save a random `family` model and its tokenizer to `path` as an ordinary Hugging Face directory.

    Args:
        family: One of `FAMILIES` (transformers' model types).
        path: Directory to create.
        layers: Decoder layers; Gemma 3 alternates local and global ones.
        seed: Of the weights. Biases and norm weights are random too, so that dropping one shows.
        dtype: Of the saved weights.
        max_shard_size: Small values ("100KB") give a sharded checkpoint with an index.
        overrides: Configuration fields, e.g. ``intermediate_size=72`` for a K that is no multiple of 16.

    Returns:
        `path`.
    """
    fields = _COMMON | _SPECIFIC[family] | {"num_hidden_layers": layers} | overrides
    if family == "gemma3_text":
        fields.setdefault("layer_types", [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(path)
    return path
