"""`main`: parse, run the command, print its data or its error, return the exit code.

Exit codes: 0 done; 1 unexpected, or damaged input; 2 usage; 3 a gate failed; 4 not possible here; 130 interrupted.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fp4pipe import __version__, console
from fp4pipe.allocator import keep_freed_memory
from fp4pipe.cli.bench import bench
from fp4pipe.cli.doctor import doctor
from fp4pipe.cli.inspect import inspect
from fp4pipe.cli.interrupts import noted_interrupts
from fp4pipe.cli.outcome import Interrupted, Outcome
from fp4pipe.cli.quantize import quantize
from fp4pipe.cli.recipes import recipes
from fp4pipe.cli.run import run
from fp4pipe.cli.serve import serve
from fp4pipe.cli.stdout import command
from fp4pipe.cli.validate import validate
from fp4pipe.errors import Fp4pipeError, GateFailed, UsageError

_PARSER_INTERRUPTED = 130
"""What the parser returns for a Ctrl-C before the command began."""

app = typer.Typer(
    help="From a Hugging Face causal LM to a validated, servable NVFP4 deployment.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _function, _summary in (
    (quantize, "Quantize a model to NVFP4, export it and audit the files."),
    (validate, "Prove a checkpoint right and measure what four bits cost."),
    (serve, "Serve a checkpoint with an OpenAI-compatible HTTP server."),
    (run, "Carry out a recipe: quantize, audit, validate, ask, with gates."),
    (inspect, "Show what a checkpoint holds, of any tool, and check it."),
    (doctor, "Show what this machine can run, and with which kernels."),
):
    app.command(short_help=_summary)(command(_function))
app.add_typer(recipes, name="recipes")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after `fp4pipe`; None takes the process's own.

    Returns:
        The exit code.
    """
    keep_freed_memory()
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    debug = "--debug" in words or os.environ.get("FP4PIPE_DEBUG") == "1"
    _quiet_libraries(debug)
    with noted_interrupts() as pressed:
        try:
            result = app(words, prog_name="fp4pipe", standalone_mode=False)
            if isinstance(result, Outcome):
                return _finish(result, as_json)
            if result == _PARSER_INTERRUPTED:
                raise Interrupted("interrupted")
            return result if isinstance(result, int) else 0
        except Interrupted as error:
            return _fail(_described(error), as_json)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the reader left: nothing more to say, not even at exit
            return 0
        except Exception as error:
            if debug:
                traceback.print_exc()
            if pressed:  # some libraries turn Ctrl-C into an error of their own
                return _fail(_described(Interrupted("interrupted")), as_json)
            return _fail(_described(error, debug=debug), as_json)


def _quiet_libraries(debug: bool) -> None:
    """Set what the libraries read when they are imported: no bars in logs, no remarks meant for their developers."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns after every fork


def _finish(outcome: Outcome, as_json: bool) -> int:
    if as_json:
        console.emit(outcome.document)
    elif outcome.text:
        print(outcome.text, flush=True)
    for sentence in outcome.failed:
        console.say(f"error: gate failed: {sentence}")
    return GateFailed.exit_code if outcome.failed else 0


def _described(error: BaseException, *, debug: bool = False) -> dict[str, Any]:
    """The parts of an error, those of the command-line parser included."""
    kind, exit_code, because, fix = type(error).__name__, 1, None, None
    if isinstance(error, Fp4pipeError):
        what, because, fix, exit_code = error.what, error.because, error.fix, error.exit_code
    elif isinstance(error, typer.TyperException):  # what the parser says of a wrong command line
        context = getattr(error, "ctx", None)
        what = getattr(error, "format_message", error.__str__)()
        kind, exit_code = UsageError.__name__, UsageError.exit_code
        fix = f"{context.command_path if context else 'fp4pipe'} --help"
    elif isinstance(error, Interrupted):
        what, exit_code = str(error), 130
    else:
        what = f"{kind}: {' '.join(str(error).split()) or 'no message'}"
        fix = None if debug else "the same command with --debug shows where it happened"
    return {"type": kind, "what": what, "because": because, "fix": fix, "exit_code": exit_code}


def _fail(error: dict[str, Any], as_json: bool) -> int:
    console.say(f"error: {error['what']}")
    if error["because"]:
        console.say(f"  because {error['because']}")
    if error["fix"]:
        console.say(f"  try: {error['fix']}")
    if as_json:
        console.emit({"error": error})
    return error["exit_code"]
