"""Single tokens as text and bytes, for log probabilities."""

from functools import lru_cache
from typing import Any


class TokenText:
    """Says which bytes each token stands for, without the tokens around it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            return b"".join(table[c] if c in table else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def text(self, token_id: int) -> str:
        """The token's bytes as text, with a replacement character for those that are only part of one."""
        return self.bytes(token_id).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, bytes]:
    """The characters that byte-level vocabularies (GPT-2, Radford et al. 2019) use for bytes: printable Latin-1 for
    itself, and code points from 256 on, in order, for the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(rest)}
