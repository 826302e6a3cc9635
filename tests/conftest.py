"""What all tests share: which of them can run here, the data beside the repository, quiet and offline libraries."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp4pipe.allocator import keep_freed_memory

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared"

if os.environ.get("FP4PIPE_TEST_HUB") != "1":  # read by huggingface_hub when it is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
keep_freed_memory()  # as the command does


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine or this call was not meant to run."""
    asked = config.getoption("-m")
    for item in items:
        for marker, reason in _why_not(item, asked):
            item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _why_not(item: pytest.Item, asked: str) -> Iterator[tuple[str, str]]:
    if item.get_closest_marker("hub") and os.environ.get("FP4PIPE_TEST_HUB") != "1":
        yield "hub", "set FP4PIPE_TEST_HUB=1 where the Hugging Face hub can be reached"
    if item.get_closest_marker("slow") and "slow" not in asked:
        yield "slow", "ask for it with -m slow"
    for marker, capabilities in (("gpu", None), ("blackwell", {(10, 0), (10, 3), (12, 0), (12, 1)})):
        if item.get_closest_marker(marker):
            import torch

            if not torch.cuda.is_available():
                yield marker, "no CUDA GPU"
            elif capabilities and torch.cuda.get_device_capability() not in capabilities:
                yield marker, f"{torch.cuda.get_device_name()} is none"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """`../shared/data`: GSM8K, MGSM and texts, where they lie beside the repository."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return SHARED / "data"


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., "CliResult"]:
    """Run the `fp4pipe` command in this process: `cli("recipes", "list").stdout`."""
    from fp4pipe.cli import main

    def run(*words: str | Path) -> CliResult:
        capfd.readouterr()
        code = main([str(word) for word in words])
        sys.stdout.flush()
        return CliResult(code, *capfd.readouterr())

    return run


class CliResult:
    """Exit code, stdout and stderr of one command."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
