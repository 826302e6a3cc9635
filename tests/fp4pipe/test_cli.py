"""The command itself: quick help, errors people can act on, stdout that is data."""

import json
import os
import re
import resource
import signal
import subprocess
import sys

import pytest

from fp4pipe.errors import CheckpointError, GateFailed, SourceError, Unavailable, UsageError
from tests.fp4pipe.checkpoints import write_checkpoint

COMMANDS = ("quantize", "validate", "serve", "run", "inspect", "doctor")
RECIPE_COMMANDS = ("list", "show", "copy", "check")


def test_help_is_quick_and_imports_nothing_heavy():
    """In processor time, the least of three runs: wall time when the machine has nothing else to do."""
    script = (
        "import sys; from fp4pipe.cli import main; code = main(['--help']);"
        "heavy = {'torch', 'transformers', 'modelopt', 'numpy', 'pydantic', 'yaml', 'fastapi', 'rich'};"
        "heavy &= set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert all(command in done.stdout for command in (*COMMANDS, "recipes"))
    assert min(took) < 0.7


@pytest.mark.parametrize("words", [(), *((c,) for c in COMMANDS), *(("recipes", c) for c in RECIPE_COMMANDS)])
def test_every_command_explains_itself(cli, words):
    result = cli(*words, "--help")
    assert result.code == 0
    assert result.stdout.startswith(f"Usage: {' '.join(['fp4pipe', *words])}")
    assert not words or ("--json" in result.stdout and "--debug" in result.stdout)


def test_version_and_no_command(cli):
    from fp4pipe import __version__

    assert cli("--version").stdout.strip() == __version__
    assert cli().stdout.startswith("Usage: fp4pipe")
    assert "..." not in cli().stdout.partition("Commands:")[2]  # no command's line is cut off


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("quantise",), "No such command 'quantise'", "fp4pipe --help"),
        (("quantize", "m", "--scheem", "x"), "--scheem", "fp4pipe quantize --help"),
        (("quantize",), "Missing argument 'SOURCE'", "fp4pipe quantize --help"),
        (("quantize", "m", "--calib-samples", "none"), "--calib-samples", "fp4pipe quantize --help"),
        (("quantize", "m"), "--out is missing", "--out DIR"),
        (("run", "smollm2"), "did you mean 'smollm2-135m'", "fp4pipe recipes list"),
        (("run", "tiny-random", "lod.mode=w4a4"), "did you mean 'load'", None),
        (("recipes", "check", "nowhere.yaml"), "nowhere.yaml does not exist", "fp4pipe recipes list"),
    ],
)
def test_usage_errors_exit_2_and_say_what_to_do(cli, words, what, fix):
    result = cli(*words)
    assert result.code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert what in result.stderr
    assert fix is None or f"  try: {fix}" in result.stderr
    assert "Traceback" not in result.stderr

    as_json = cli(*words, "--json")
    assert as_json.code == 2
    error = json.loads(as_json.stdout)["error"]
    assert error["type"] == "UsageError"
    assert error["exit_code"] == 2
    assert what in error["what"]
    assert as_json.stderr == result.stderr


def test_what_is_not_there(cli, tmp_path):
    for words in (("inspect", tmp_path / "no"), ("serve", tmp_path / "no"), ("validate", tmp_path / "no")):
        result = cli(*words, "--json")
        assert result.code == 1
        assert result.stderr.startswith(f"error: {tmp_path / 'no'}")
        json.loads(result.stdout)
    result = cli("quantize", tmp_path / "no", "--dry-run")
    assert result.code == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'no'}")


@pytest.mark.parametrize("kind", [CheckpointError, SourceError, UsageError, GateFailed, Unavailable])
def test_known_errors_have_three_lines_and_their_exit_code(cli, monkeypatch, kind):
    def fail(*_):
        raise kind("tensor x is damaged", because="it ends early", fix="copy it again")

    monkeypatch.setattr("fp4pipe.recipe_file.load_recipe", fail)
    result = cli("recipes", "check", "tiny-random")
    assert result.code == kind.exit_code
    assert result.stderr == "error: tensor x is damaged\n  because it ends early\n  try: copy it again\n"
    assert "Traceback" in cli("recipes", "check", "tiny-random", "--debug").stderr


def test_unexpected_errors_are_one_line_and_a_hint(cli, monkeypatch):
    def fail(*_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("fp4pipe.recipe_file.load_recipe", fail)
    result = cli("recipes", "check", "tiny-random")
    assert result.code == 1
    assert result.stderr == (
        "error: RuntimeError: first line second line\n  try: the same command with --debug shows where it happened\n"
    )
    monkeypatch.setenv("FP4PIPE_DEBUG", "1")
    assert "Traceback" in cli("recipes", "check", "tiny-random").stderr


def test_interrupted(cli, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4pipe.recipe_file.load_recipe", interrupt)
    result = cli("recipes", "check", "tiny-random", "--json")
    assert result.code == 130
    assert json.loads(result.stdout)["error"]["exit_code"] == 130


def test_an_interrupt_that_a_library_turned_into_an_error(cli, monkeypatch):
    def interrupt(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ValueError("Error building a validator") from error

    monkeypatch.setattr("fp4pipe.recipe_file.load_recipe", interrupt)
    result = cli("recipes", "check", "tiny-random", "--json")
    assert result.code == 130
    assert json.loads(result.stdout)["error"]["what"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_command_begins(cli, monkeypatch):
    monkeypatch.setattr("fp4pipe.cli.stdout.stdout_to_stderr", lambda: signal.raise_signal(signal.SIGINT))
    result = cli("recipes", "check", "tiny-random", "--json")
    assert result.code == 130
    assert json.loads(result.stdout)["error"]["exit_code"] == 130


def test_whatever_libraries_print_stdout_stays_one_document(cli, monkeypatch):
    from fp4pipe import recipe_file

    original = recipe_file.load_recipe

    def chatty(*arguments):
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        return original(*arguments)

    monkeypatch.setattr("fp4pipe.recipe_file.load_recipe", chatty)
    result = cli("recipes", "check", "tiny-random", "--json")
    assert result.code == 0
    assert json.loads(result.stdout)["ok"] is True
    for text in ("from Python", "from C", "from a child"):
        assert text in result.stderr


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m fp4pipe recipes show tiny-random | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


# -- recipes


def test_recipes_list_show_check(cli):
    listed = json.loads(cli("recipes", "list", "--json").stdout)["recipes"]
    assert {row["name"] for row in listed} >= {"smollm2-135m", "tiny-random"}
    text = cli("recipes", "list").stdout
    assert all(row["name"] in text and row["description"] in text for row in listed)

    shown = json.loads(cli("recipes", "show", "tiny-random", "load.mode=w4a4", "--json").stdout)
    assert shown["load"]["mode"] == "w4a4"
    assert cli("recipes", "check", "tiny-random").stdout == "tiny-random: ok\n"


def test_a_shown_recipe_is_a_recipe(cli, tmp_path):
    shown = cli("recipes", "show", "smollm2-135m").stdout
    (tmp_path / "shown.yaml").write_text(shown)
    assert cli("recipes", "show", tmp_path / "shown.yaml").stdout == shown


def test_recipes_copy_keeps_comments_and_never_overwrites(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("recipes", "copy", "tiny-random").stdout == "tiny-random.yaml\n"
    assert (tmp_path / "tiny-random.yaml").read_text().startswith("#")
    again = cli("recipes", "copy", "tiny-random")
    assert again.code == 2
    assert "tiny-random.yaml exists" in again.stderr
    assert cli("recipes", "copy", "tiny-random", "mine.yaml").code == 0
    assert cli("recipes", "check", "mine.yaml").stdout == "mine: ok\n"


# -- inspect


def test_inspect_names_a_damaged_file_once(cli, tmp_path):
    (tmp_path / "made").mkdir()
    result = cli("inspect", tmp_path / "made")
    assert result.code == 3
    assert result.stderr.count("config.json") == 1
    assert result.stdout.count("config.json") == 1


def test_inspect_keeps_the_names_found_in_the_files(cli, tmp_path):
    write_checkpoint(tmp_path / "made", kv=False)
    shown = cli("inspect", tmp_path / "made").stdout
    assert "F8_E4M3: " in shown
    assert "q_proj: 2 of NVFP4 64 x 64" in shown
    assert "kv cache: none" in shown
    assert "exclude: lm_head" in shown
    assert re.search(r"bytes\n +total: [\d.]+ KiB", shown)


# -- doctor


def test_doctor_says_what_each_mode_will_use(cli):
    result = cli("doctor")
    assert result.code == 0
    assert "--mode w4a4" in result.stdout
    document = json.loads(cli("doctor", "--json").stdout)
    assert document["devices"][0]["device"] == "cpu"
    assert document["devices"][0]["backend"] == "reference"
    assert document["packages"]["torch"]


# -- run


def test_a_run_looks_at_its_device_before_it_starts(cli, tmp_path):
    result = cli("run", "tiny-random", "load.device=tpu", "--out", tmp_path / "out")
    assert (result.code, result.stderr.splitlines()[0]) == (2, "error: device 'tpu' is unknown")
    assert not (tmp_path / "out").exists()
