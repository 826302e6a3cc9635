"""Keeping stdout for a command's data, whatever the libraries under it print."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from typing import Annotated, Any

import typer

from fp4pipe.cli.outcome import Interrupted, Outcome

_EVERY_COMMAND = {
    "json": Annotated[bool, typer.Option("--json", help="Print exactly one JSON document on stdout.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


def command(function: Callable[..., Outcome | None]) -> Callable[..., Outcome | None]:
    """Add `--json` and `--debug` to a command's options and send what is printed while it runs to stderr.

    `main` acts on the two options, as it must also when the command never starts.
    """

    @wraps(function)
    def run(**arguments: Any) -> Outcome | None:
        with stdout_to_stderr():
            try:
                return function(**{name: value for name, value in arguments.items() if name not in _EVERY_COMMAND})
            except KeyboardInterrupt as error:
                raise Interrupted("interrupted") from error

    signature = inspect.signature(function)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in _EVERY_COMMAND.items()
    ]
    run.__annotations__ = {**function.__annotations__, **_EVERY_COMMAND}
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    return run


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Both Python's stdout and file descriptor 1, which libraries in C and child processes write to."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
