"""The shipped tiny recipe from source to answer, as a user runs it, and the other commands on what it made."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment with a cache of its own and no hub."""
    return {**os.environ, "FP4PIPE_CACHE": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def fp4pipe(
    cli: Callable, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict, str]]:
    """Run the command with --json, in this process, which has its imports behind it; its document and its stderr."""
    monkeypatch.setenv("FP4PIPE_CACHE", environment["FP4PIPE_CACHE"])

    def call(*words: str | Path, code: int = 0) -> tuple[dict, str]:
        result = cli(*words, "--json")
        assert result.code == code, result
        return json.loads(result.stdout), result.stderr

    return call


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(environment: dict[str, str], out: Path) -> tuple[dict, str]:
    """The recipe, run once, in a process of its own."""
    command = [sys.executable, "-m", "fp4pipe", "run", "tiny-random", "--out", str(out), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_recipe_passes_all_its_gates(run, out):
    document, stderr = run
    assert document["ok"]
    assert document["failures"] == []
    assert len(document["gates"]) == 5
    assert all(gate["ok"] for gate in document["gates"])
    assert {check["name"].split(".")[0] for check in document["validation"]["checks"]} == {
        "ops",
        "graphs",
        "parity",
        "perplexity",
        "agreement",
    }
    assert document["answer"]["usage"]["completion_tokens"] > 0
    assert document["answer"]["answer"].strip()
    assert json.loads(Path(document["report"]).read_text())["ok"]
    assert str(out / "checkpoint") in stderr
    assert all(row["figure"] in stderr for row in document["table"])


def test_a_second_run_keeps_every_step(run, fp4pipe, out):
    document, stderr = fp4pipe("run", "tiny-random", "--out", out)
    assert document["kept"] == ["ask", "quantize", "validate"]
    assert document["table"][3:5] == run[0]["table"][3:5]
    assert stderr.count("kept, nothing it depends on has changed") == 3


def test_a_gate_that_fails_exits_3_and_measures_nothing_again(run, fp4pipe, out):
    document, stderr = fp4pipe("run", "tiny-random", "gates.perplexity.ratio=<=0.5", "--out", out, code=3)
    assert not document["ok"]
    assert document["kept"] == ["ask", "quantize", "validate"]
    assert "error: gate failed: gate perplexity.ratio <=0.5: perplexity.w4a16.ratio = " in stderr


def test_a_gate_on_a_check_that_is_not_made_is_refused_before_anything_runs(fp4pipe, tmp_path):
    document, _ = fp4pipe("run", "tiny-random", "gates.gsm8k.verdict=pass", "--out", tmp_path / "no", code=2)
    assert "gsm8k" in document["error"]["what"]
    assert not (tmp_path / "no").exists()


def test_inspect_accepts_it(run, fp4pipe, out):
    document, _ = fp4pipe("inspect", out / "checkpoint")
    assert document["ok"]
    assert not [f for f in document["findings"] if f["severity"] == "error"]
    assert document["summary"]["bits_per_parameter"]["nvfp4"] == pytest.approx(4.5, abs=0.1)


def test_inspect_refuses_a_damaged_copy(run, fp4pipe, out, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", out / "checkpoint", copy], check=True)
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    document, stderr = fp4pipe("inspect", copy, code=3)
    assert not document["ok"]
    assert "model.safetensors" in stderr


def test_validate_finds_the_source_in_the_checkpoint(run, fp4pipe, out, tmp_path):
    words = ["--parity", "--agreement", "--positions", "64", "--tokens", "64", "--runner", "off"]
    document, _ = fp4pipe("validate", out / "checkpoint", *words, "--report", tmp_path / "report")
    assert list(document["modes"]) == ["w4a4"]
    assert document["figures"]["parity.w4a4.top1"] >= 0.99
    assert json.loads((tmp_path / "report" / "report.json").read_text())["ok"]


def test_validate_gate(run, fp4pipe, out):
    words = ["--perplexity", "--tokens", "64", "--runner", "off", "--mode", "w4a16"]
    _, stderr = fp4pipe("validate", out / "checkpoint", *words, "--gate", "perplexity.ratio=<=0.1", code=3)
    assert "gate perplexity.ratio <=0.1" in stderr


@pytest.fixture
def server(run, environment: dict[str, str], out: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """`fp4pipe serve` on a free port; the process and its address."""
    words = ["serve", str(out / "checkpoint"), "--port", "0", "--graphs", "off", "--served-model-name", "tiny"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4pipe", *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("Ready: "):
            break
    else:
        pytest.fail("".join(lines))
    yield process, lines[-1].split()[1].removesuffix("/v1")
    process.kill()
    process.wait()


def test_serve_answers_the_official_client_and_stops_on_a_signal(server, run):
    from openai import OpenAI

    process, url = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Say something."}], temperature=0, max_tokens=128
    )
    assert answer.choices[0].message.content == run[0]["answer"]["answer"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def test_quantize_dry_run_writes_nothing(fp4pipe, tmp_path):
    document, stderr = fp4pipe("quantize", "random:qwen2", "--out", tmp_path / "no", "--dry-run")
    assert not (tmp_path / "no").exists()
    assert document["plan"]["problems"] == []
    assert "Plan for random:qwen2" in stderr
    assert document["plan"]["bytes_after"] < document["plan"]["bytes_before"]
