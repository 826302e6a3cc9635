"""Every error a user can cause, in one shape: what happened, the fact observed, what to do.

Fp4pipeError            exit 1
├── CheckpointError         a checkpoint on disk is damaged, incomplete or inconsistent
├── SourceError             the model to convert cannot be read or converted
├── UsageError          exit 2: arguments, recipe or request
├── GateFailed          exit 3: a gate of `validate` or of a recipe did not hold
└── Unavailable         exit 4: this machine or installation cannot do it
"""


class Fp4pipeError(Exception):
    """An error with a cause the user can act on.

    Args:
        what: One line: what failed, naming the tensor, file, flag or key.
        because: The fact observed, when `what` does not already say it.
        fix: What the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, because: str | None = None, fix: str | None = None) -> None:
        self.what, self.because, self.fix = what, because, fix
        parts = [what]
        if because:
            parts.append(f"because {because}")
        if fix:
            parts.append(f"try: {fix}")
        super().__init__("; ".join(parts))

    def __reduce__(self):  # type: ignore[override]
        """Keep the three parts when the error crosses a process boundary."""
        return _rebuild, (type(self), self.what, self.because, self.fix)


def first_line(error: BaseException) -> str:
    """What another library's error says, on one line: its first, and what follows a colon at the end of that one."""
    said = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        said = f"{said} {line}".strip()
        if not said.endswith(":"):
            break
    return said or type(error).__name__


def _rebuild(kind: type[Fp4pipeError], what: str, because: str | None, fix: str | None) -> Fp4pipeError:
    return kind(what, because=because, fix=fix)


class CheckpointError(Fp4pipeError):
    """A checkpoint on disk is damaged, incomplete or inconsistent."""


class SourceError(Fp4pipeError):
    """The model to convert cannot be read or converted."""


class UsageError(Fp4pipeError):
    """Arguments, recipe or request are wrong."""

    exit_code = 2


class GateFailed(Fp4pipeError):
    """A gate of `validate` or of a recipe did not hold."""

    exit_code = 3


class Unavailable(Fp4pipeError):
    """This machine or this installation cannot do what was asked."""

    exit_code = 4
