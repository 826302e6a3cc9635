"""What a command hands back: data for stdout, and the gates that failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command that ran to its end.

    Args:
        document: What `--json` prints.
        text: What is printed on stdout otherwise; empty when all was said on stderr.
        failed: One sentence for each gate that did not hold; any makes the exit code 3.
    """

    document: Mapping[str, Any]
    text: str = ""
    failed: tuple[str, ...] = ()


class Interrupted(BaseException):
    """Ctrl-C while a command ran, under a name that the command-line parser lets through."""
