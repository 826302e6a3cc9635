"""Requests as OpenAI defines them, with the sampling extensions that vLLM and SGLang clients send.

Unknown fields are ignored, since clients send many; fields that are known and not supported are refused, since an
answer that leaves them out would be wrong.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fp4pipe.runtime.engine.params import MAX_LOGPROBS, SamplingParams

MAX_STOPS = 64
MAX_STOP_CHARS = 1024

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("give a string or a list of strings")
    if not all(0 < len(s) <= MAX_STOP_CHARS for s in stops) or len(stops) > MAX_STOPS:
        raise ValueError(f"give at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _biases(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("give an object of token ids and numbers")
    try:
        biases = {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("keys must be token ids") from None
    if not all(isinstance(b, int | float) and not isinstance(b, bool) and -100 <= b <= 100 for b in biases.values()):
        raise ValueError("values must be numbers from -100 to 100")
    return biases


def _prompts(value: Any) -> Any:
    """Any of the four forms as a list of texts or lists of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _are_ids(value):
            return [value]
        if all(isinstance(item, list) and item and _are_ids(item) for item in value):
            return value
    raise ValueError(
        "give a string, a list of strings, a list of token ids, or a list of lists of token ids, not empty"
    )


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    include_usage: bool | None = None


class SamplingRequest(BaseModel):
    """Fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: int | None = None
    min_p: Finite | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    """Give each choice its `token_ids`, as vLLM does."""

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for requests with stream: true")
        if self.response_format and self.response_format.get("type", "text") != "text":
            raise ValueError(f"response_format of type {self.response_format['type']!r} is not supported")
        return self

    @property
    def include_usage(self) -> bool:
        """A last chunk with the usage was asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, defaults: dict[str, Any], **more: Any) -> SamplingParams:
        """Sampling parameters: the request's, else `defaults`, else OpenAI's.

        Raises:
            UsageError: A value is out of range.
        """
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        return SamplingParams(**{"temperature": 1.0, **defaults, **given, **more})


SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens",
)  # fmt: skip


class CompletionRequest(SamplingRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> "CompletionRequest":
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is supported only equal to n")
        return self


class Message(BaseModel):
    """One message of a chat; fields beyond these go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, its text in one string."""
        fields = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            fields["content"] = "".join(part["text"] for part in self.content)
        return fields

    @model_validator(mode="after")
    def _only_text(self) -> "Message":
        for part in self.content if isinstance(self.content, list) else ():
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"content parts must be of type text; {part.get('type')!r} is not supported")
        return self


class ChatRequest(SamplingRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> "ChatRequest":
        if self.tools and self.tool_choice != "none":
            raise ValueError("tools are not supported")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
