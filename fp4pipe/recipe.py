"""Recipes: one YAML file that says what to quantize, how, what to prove about the result and which gates it must pass.

This is the schema; `fp4pipe.recipe_file` finds, reads and overrides the files.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Mode = Literal["auto", "w4a4", "w4a16"]


class Section(BaseModel):
    """A mapping of a recipe: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Calibration(Section):
    """Which text the activation scales are measured on."""

    dataset: str = Field(
        default="bundled", description="`bundled`, a .jsonl/.txt/.parquet path, or a data set name on the hub"
    )
    samples: int = Field(default=128, gt=0, description="number of texts")
    seq_len: int = Field(default=512, gt=0, description="tokens kept of each text")
    seed: int = Field(default=0, description="order in which texts are drawn")
    batch_size: int = Field(default=8, gt=0, description="texts of equal length run together")
    split: str | None = Field(default=None, description="split of a hub data set")
    text_column: str | None = Field(default=None, description="column that holds the text")
    chat_template: bool = Field(default=True, description="render dialogues through the model's chat template")


class Quantize(Section):
    """What `fp4pipe quantize` is told."""

    scheme: str = Field(default="nvfp4", description="preset or ModelOpt recipe: which layers, which number format")
    algorithm: str = Field(default="max", description="how scales are chosen from the calibration statistics")
    kv_cache: str = Field(default="none", description="KV cache format written to the checkpoint")
    exclude: tuple[str, ...] = Field(default=(), description="module patterns kept unquantized")
    max_shard_size: str = Field(default="5GB", description="largest safetensors file")
    device: str = Field(default="auto", description="where calibration runs")
    calibration: Calibration = Calibration()


class Load(Section):
    """How the checkpoint is loaded to be validated and served."""

    mode: Mode = Field(
        default="auto", description="w4a4: activations in NVFP4 too; w4a16: weights only; auto: what fits the GPU"
    )
    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda` or `cuda:N`")
    dtype: str = Field(default="auto", description="compute type; auto: float32 on a CPU, else the checkpoint's")
    graphs: Literal["compiled", "segmented", "off"] = Field(default="compiled", description="how steps are run")
    compiler: Literal["inductor", "eager"] = Field(default="inductor", description="of compiled graphs")
    fp4_gemm_backend: Literal["auto", "cutlass", "cudnn", "trtllm", "cute-dsl", "cutedsl_low_latency", "b12x"] = Field(
        default="auto", description="kernels of w4a4 products on Blackwell"
    )
    prefill: Literal["bf16", "fp8"] = Field(
        default="bf16", description="fp8: faster prompts on Hopper in w4a16, approximate"
    )
    lm_head: Literal["bf16", "fp8", "nvfp4"] = Field(
        default="bf16", description="bf16: as the checkpoint has it; else quantized at load, approximate"
    )
    load_threads: int = Field(default=8, gt=0, description="threads that read the weights")
    kv_tokens: int | None = Field(
        default=None, gt=0, description="tokens a KV cache holds; null: 2048 for each sequence run at a time"
    )


class Gsm8k(Section):
    """Grade-school arithmetic, the same questions on source and checkpoint, paired verdict."""

    questions: int | None = Field(default=200, gt=0, description="null: all 1,319")
    shots: int | None = Field(
        default=None, ge=0, description="worked examples in the prompt; null: the style's own number"
    )
    style: Literal["ours", "sglang"] = Field(default="ours", description="prompt, stops and parser")
    data: str | None = Field(default=None, description="directory with train.jsonl and test.jsonl; null: from the hub")
    max_tokens: int = Field(default=512, gt=0, description="length of an answer")
    in_flight: int = Field(default=64, gt=0, le=500, description="questions in the engine at once")
    margin: float = Field(default=0.02, gt=0, lt=1, description="loss of accuracy tolerated, as a share of questions")
    seed: int = Field(default=0, description="which examples are shown")


class Checks(Section):
    """What `fp4pipe validate` proves and measures; 0, false and null leave a check out."""

    modes: tuple[Mode, ...] = Field(
        default=("w4a16", "w4a4"), min_length=1, description="numerics, one after the other"
    )
    ops: bool = Field(default=True, description="the operators against float64 and the files")
    graphs: bool = Field(default=True, description="the captured pieces against the model run eagerly")
    buckets: int | None = Field(default=None, gt=0, description="token buckets that `graphs` tries; null: all")
    parity_positions: int = Field(default=2000, ge=0, description="logits compared with ModelOpt's own model")
    perplexity_tokens: int = Field(default=4096, ge=0, description="tokens scored")
    agreement_tokens: int = Field(default=2048, ge=0, description="next-token distributions compared with the source's")
    gsm8k: Gsm8k | None = None
    text: str = Field(default="bundled", description="`bundled`, or a text file, for parity, perplexity and agreement")
    window: int = Field(default=512, gt=1, description="tokens scored in one piece")
    seed: int = Field(default=0, description="of random inputs")


class Recipe(Section):
    """A whole run: source, quantization, loading, checks, gates, one question through the server."""

    name: str = Field(default="", pattern="^[^/.][^/]*$", description="default: the file's name")
    description: str = Field(min_length=1, description="one line, shown by `fp4pipe recipes list`")
    source: tuple[str, ...] = Field(min_length=1, description="tried in order, the first that can be reached is used")
    revision: str | None = Field(default=None, description="commit of the hub repository")
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")
    quantize: Quantize = Quantize()
    load: Load = Load()
    checks: Checks = Field(default=Checks(), alias="validate")
    gates: dict[str, str] = Field(
        default={}, description='bounds on figures: `{parity.top1: ">=0.99"}`, or nested `{parity: {top1: ">=0.99"}}`'
    )
    ask: str | None = Field(default=None, description="chat question answered through the HTTP server at the end")

    @field_validator("source", mode="before")
    @classmethod
    def _one_source_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("gates", mode="before")
    @classmethod
    def _flat_gates(cls, value: Any) -> Any:
        """Names joined with dots; a bound of null takes a gate away."""
        if not isinstance(value, dict):
            return value
        flat = dict(_flatten(value))
        return {name: bound for name, bound in flat.items() if bound is not None}


def _flatten(bounds: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, bound in bounds.items():
        if isinstance(bound, dict):
            yield from _flatten(bound, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", bound if bound is None else str(bound)
