"""How a server is set up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp4pipe.errors import UsageError


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    api_key: str | None = field(default=None, repr=False)
    """When set, requests must carry it as a bearer token; /health and /metrics stay open."""
    served_model_name: str | None = None
    """Name that requests use; the checkpoint's directory name when absent."""
    max_queued: int = 512
    """Sequences that may wait beyond those running; more are answered 429."""
    max_sequences: int = 256
    """Sequences that one request may ask for: prompts times n."""
    max_body_bytes: int = 16 << 20
    send_timeout_s: float = 60.0
    """A client that takes longer to accept one piece of a stream is dropped."""
    failure_grace_s: float = 5.0
    """Time that /health answers 503 after the engine has failed, before the server ends."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Engine.load`."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty, which anybody could send", fix="a key, or no --api-key at all")
