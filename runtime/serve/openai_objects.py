"""The objects that answers are made of, as the OpenAI API defines them."""

from collections.abc import Sequence
from typing import Any

from fp4pipe.runtime.engine import Output, TokenLogprob
from fp4pipe.runtime.engine.request import Completion
from fp4pipe.runtime.serve.token_text import TokenText


class Usage:
    """Counts the tokens of one request's sequences, each prompt once however many sequences share it."""

    def __init__(self, sequences_per_prompt: int) -> None:
        self._per_prompt = sequences_per_prompt
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion: dict[int, int] = {}

    def add(self, index: int, output: Output) -> None:
        """Take note of sequence `index` so far."""
        self._prompt[index // self._per_prompt] = output.prompt_tokens
        self._cached.setdefault(index // self._per_prompt, output.cached_tokens)
        self._completion[index] = output.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        prompt, completion = sum(self._prompt.values()), sum(self._completion.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def completion_logprobs(
    reports: Sequence[TokenLogprob | None], first_token: int | None, text: TokenText, offset: int
) -> dict[str, Any]:
    """`logprobs` of a text completion.

    Args:
        reports: One a token; None for the first token of a prompt, which has no probability.
        first_token: That first token.
        text: Names tokens.
        offset: Characters of text before these tokens.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for report in reports:
        token = text.text(report.token_id if report else first_token or 0)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        tops.append(_top(report, text) if report else None)
    return {
        "tokens": tokens,
        "token_logprobs": [report.logprob if report else None for report in reports],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _top(report: TokenLogprob, text: TokenText) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in report.top:
        top.setdefault(
            text.text(token_id), logprob
        )  # parts of characters may share a text: the likeliest stands for them
    return top


def chat_logprobs(reports: Sequence[TokenLogprob], text: TokenText) -> dict[str, Any]:
    """`logprobs` of a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": text.text(token_id), "logprob": logprob, "bytes": list(text.bytes(token_id))}

    return {
        "content": [
            {**entry(r.token_id, r.logprob), "top_logprobs": [entry(*alternative) for alternative in r.top]}
            for r in reports
        ]
    }


def finish_fields(done: Completion | Output, *, token_ids: bool | None) -> dict[str, Any]:
    """How a choice says why it ended, or that it has not, and its tokens where they are asked for."""
    fields = {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    return {**fields, "token_ids": done.token_ids} if token_ids else fields
