"""Tokens to text while they come: characters are never split, stop strings never shown."""

import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fp4pipe.errors import CheckpointError

CONTEXT_TOKENS = 6
"""Prompt tokens decoded along with the first output: whether a word starts with a space depends on what is before."""

LONG_WINDOW = 32
"""Tokens without a settled character after which the window is shortened."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of the checkpoint at `path`.

    Raises:
        CheckpointError: There is none, or transformers cannot read it.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers may make up an empty one
        raise CheckpointError(
            f"{path} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}", fix="copy them from the source model"
        )
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # tokenizer files fail in as many ways as there are tokenizers
        because = str(error).partition("\n")[0]
        fix = "copy the tokenizer's files from the source model"
        raise CheckpointError(f"the tokenizer of {path} cannot be read", because=because, fix=fix) from error


class Vocabulary:
    """What streaming needs of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        vocab: dict[str, int] = tokenizer.get_vocab()
        # SentencePiece's byte fallback decodes a run of byte tokens as a whole or not at all.
        self.byte_ids = frozenset(i for token, i in vocab.items() if _BYTE_TOKEN.fullmatch(token))
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ordinary = frozenset(vocab.values()) - special
        self._known = frozenset(vocab.values())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, spaces as they are."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def stream(self, context: Sequence[int], *, skip_special_tokens: bool, stop: Sequence[str] = ()) -> "TextStream":
        """The text of tokens that follow `context`."""
        detokenizer = Detokenizer(
            lambda ids: self.decode(ids, skip_special_tokens),
            visible=self._ordinary if skip_special_tokens else self._known,
            byte_ids=self.byte_ids,
            context=context[-CONTEXT_TOKENS:],
        )
        return TextStream(detokenizer, StopStrings(stop))


class Detokenizer:
    """Decodes a growing list of tokens; the pieces returned join to what decoding the whole list gives.

    A window of the last tokens is decoded twice, with and without the new ones: the difference is the new piece. It
    moves on only when the new tokens gave text that no later token can change: not half a character, not a run of byte
    tokens.

    Args:
        decode: Tokens to text.
        visible: Tokens that can have text at all; the others are passed over, as `decode` does.
        byte_ids: Tokens that stand for one byte of a run that is decoded as a whole.
        context: Tokens before the first one; their text is not returned.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        visible: Container[int],
        byte_ids: Container[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._byte_ids = byte_ids
        self._settled = list(context)
        """Tokens whose text is out, kept because the next ones' text may depend on them."""
        self._pending: list[int] = []
        self._emitted = ""
        """Text of `_pending` that is out already."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        if token not in self._visible:
            return ""
        self._pending.append(token)
        if token in self._byte_ids:
            return ""
        text = self._text(self._settled, self._pending)
        if not text:
            return ""
        if not text.endswith(REPLACEMENT):
            return self._settle(text)
        # Perhaps half a character; everything before it stays as it is.
        sure = text[: -len(REPLACEMENT)]
        piece, self._emitted = sure[len(self._emitted) :], sure
        if len(self._pending) >= LONG_WINDOW:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The rest, as it is."""
        return self._settle(self._text(self._settled, self._pending)) if self._pending else ""

    def _settle(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        self._settled, self._pending, self._emitted = self._pending, [], ""
        return piece

    def _shorten(self, text: str) -> None:
        """Move the window on within bytes that never make a character, where that changes nothing.

        Half a character is at most three bytes, so the last four tokens hold it.
        """
        head, tail = self._pending[:-4], self._pending[-4:]
        before = self._text(self._settled, head)
        if before + self._text(head, tail) == text:
            self._settled, self._pending, self._emitted = head[-4:], tail, self._emitted[len(before) :]

    def _text(self, settled: list[int], pending: list[int]) -> str:
        before = self._decode(settled) if settled else ""
        both = self._decode(settled + pending)
        same = len(before)
        while not both.startswith(before[:same]):  # the context ends within a character that `pending` completes
            same -= 1
        return both[same:]


class StopStrings:
    """Cuts a stream of text at the first of some strings, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns the text that is certain now and the stop string that was met, if one was."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return text[:at], stop
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)


class TextStream:
    """The text of one request."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def push(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Add a token; returns the new certain text and the stop string met. Without `may_stop` none is looked for."""
        piece = self._detokenizer.push(token)
        return self._stops.push(piece) if may_stop else (piece, None)

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, and the stop string that its last characters complete."""
        text, stop = self._stops.push(self._detokenizer.flush())
        return (text, stop) if stop else (text + self._stops.flush(), None)
