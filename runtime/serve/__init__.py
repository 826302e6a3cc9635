"""An OpenAI-compatible HTTP server over the engine."""

from fp4pipe.runtime.serve.app import create_app
from fp4pipe.runtime.serve.server import running_server, serve
from fp4pipe.runtime.serve.settings import ServeSettings

__all__ = ["ServeSettings", "create_app", "running_server", "serve"]
