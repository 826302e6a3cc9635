"""Keeping the libraries' chatter off stdout, which belongs to programs, and off the screen, where it helps nobody."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet(*, stderr: bool = True) -> Iterator[None]:
    """Swallow what ModelOpt and transformers print, log and warn while the block runs.

    When the block raises, the last lines they wrote are attached to the exception as a note.

    Args:
        stderr: Swallow stderr too; false where the block shows progress of its own.
    """
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(said))
        if stderr:
            stack.enter_context(redirect_stderr(said))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_transformers_log())
        try:
            yield
        except Exception as error:
            if tail := said.getvalue().strip().splitlines()[-5:]:
                error.add_note("\n".join(tail))
            raise


@contextmanager
def _transformers_log() -> Iterator[None]:
    # Its handler keeps the stderr of import time, so redirecting stderr does not silence it.
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
