"""The built wheel is whole: installed outside the tree, it has the command, the recipes and every data file."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("fp4pipe", "calib_data", "convert", "recipes", "runtime")


def packaged_files(tree: Path) -> set[str]:
    """Path inside the package of every source and data file of the tree."""
    found = set()
    for room in ROOMS:
        for path in (tree / room).rglob("*"):
            relative = path.relative_to(tree)
            through_link = any((tree / parent).is_symlink() for parent in relative.parents)
            if path.is_file() and not path.is_symlink() and not through_link and "__pycache__" not in relative.parts:
                found.add(str(relative if room == "fp4pipe" else Path("fp4pipe") / relative))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, set[str]]:
    """Source distribution, the wheel built from it, and the files of the copy of the tree they were built from."""
    copy, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for room in ROOMS:
        shutil.copytree(REPO / room, copy / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    files = packaged_files(copy)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", dist, copy], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl")), files


def test_wheel_and_sdist_hold_every_file_of_the_package(built):
    sdist, wheel, files = built
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if name.startswith("fp4pipe/")}
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        assert not [member.name for member in archive.getmembers() if member.issym()]
    in_sdist = {name for name in names if name.startswith("fp4pipe/")}
    assert in_wheel == files
    assert in_sdist == files
    assert not [name for name in names if name.startswith("tests/")]


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path, set[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment that has the wheel, and takes its dependencies from this one."""
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, with_pip=False, symlinks=True)
    site = next(root.glob("lib/python*/site-packages"))
    # Dependencies only: this environment's own fp4pipe is an editable install, hidden by the wheel's copy before it.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [sys.executable, "-m", "pip", "--python", root / "bin" / "python", "install"]
    install = [*pip, "--quiet", "--no-deps", "--no-index", built[1]]
    subprocess.run(install, check=True, env=_clean_environment())
    return root / "bin"


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}


def _run(installed: Path, *words: str) -> str:
    done = subprocess.run(
        [installed / "fp4pipe", *words], cwd="/", env=_clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_command_works_outside_the_tree(installed):
    script = "import fp4pipe, fp4pipe.convert, fp4pipe.runtime; print(fp4pipe.__path__)"
    where = subprocess.run([installed / "python", "-c", script], cwd="/", env=_clean_environment(), capture_output=True)
    assert str(installed.parent) in where.stdout.decode()
    assert str(REPO) not in where.stdout.decode()
    assert "quantize" in _run(installed, "--help")
    listed = _run(installed, "recipes", "list")
    for recipe in (REPO / "recipes").glob("*.yaml"):
        assert recipe.stem in listed
    assert "NVFP4" in _run(installed, "recipes", "show", "smollm2-135m")
