"""Which model a command means: the first of several that can be reached, or the one a checkpoint was made from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp4pipe import console
from fp4pipe.errors import CheckpointError, SourceError, UsageError

if TYPE_CHECKING:
    from fp4pipe.checkpoint import Checkpoint
    from fp4pipe.convert.source import Source


def first_reachable(specs: Sequence[str], *, revision: str | None, trust_remote_code: bool) -> "Source":
    """The first of `specs` that can be brought to this machine.

    Args:
        specs: What `resolve_source` takes, in order of preference.
        revision: Of a hub id.
        trust_remote_code: Fetch Python code that comes with the model.

    Raises:
        SourceError: None can be reached; says why for each.
    """
    from fp4pipe.convert.source import resolve_source

    reasons: list[str] = []
    for spec in specs:
        try:
            pinned = revision if spec == specs[0] else None
            return resolve_source(spec, revision=pinned, trust_remote_code=trust_remote_code)
        except SourceError as error:
            if len(specs) == 1:
                raise
            console.say(f"{spec}: {error.because or error.what}; trying the next source")
            reasons.append(f"{spec}: {error.because or error.what}")
    raise SourceError("none of the recipe's sources can be reached", because="; ".join(reasons), fix="source=DIRECTORY")


def source_of(
    checkpoint: "Checkpoint", spec: str | None, *, required: bool, trust_remote_code: bool = False
) -> "Source | None":
    """The model `checkpoint` was made from.

    Args:
        checkpoint: Opened checkpoint.
        spec: What the user named; None takes what provenance.json names.
        required: Whether the command cannot do without.
        trust_remote_code: Fetch Python code that comes with the model.

    Returns:
        The source, or None when nobody names it or, not required, it cannot be had.

    Raises:
        UsageError: It is required, and nobody names it.
        SourceError: It cannot be had, or is not the model that the checkpoint was made from.
    """
    from fp4pipe.convert.source import resolve_source

    recorded = _recorded(checkpoint)
    if spec is None and recorded is None:
        if required:
            raise UsageError(
                f"{checkpoint.path} does not say which model it was made from",
                because="it has no provenance.json",
                fix="--baseline SOURCE",
            )
        return None
    pinned = recorded["revision"] if spec is None and recorded and recorded["kind"] == "hub" else None
    name = spec or str(recorded and recorded["spec"])
    try:
        source = resolve_source(name, revision=pinned, trust_remote_code=trust_remote_code)
    except SourceError as error:
        if spec or required:
            raise
        console.warn(f"comparisons with the source are left out: {error}")
        return None
    if recorded and source.fingerprint != recorded["fingerprint"]:
        message = f"{name} is not the model {checkpoint.path} was made from"
        if spec is None:
            raise SourceError(message, because="its files have changed", fix="--baseline SOURCE")
        console.warn(f"{message}: its fingerprint differs from the one in provenance.json")
    return source


def _recorded(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """The `source` of provenance.json, if the checkpoint has a sound one."""
    from fp4pipe.quant_config import read_json

    if not (checkpoint.path / "provenance.json").exists():
        return None
    try:
        source = read_json(checkpoint.path / "provenance.json")["source"]
        return {key: source[key] for key in ("spec", "kind", "revision", "fingerprint")}
    except (CheckpointError, KeyError, TypeError):
        console.warn(f"{checkpoint.path / 'provenance.json'} does not name a source")
        return None
