"""Recipes: one YAML file that says what to quantize, how, what to prove about the result and which gates it must pass.

This is the schema; `fp4pipe.recipe_file` finds, reads and overrides the files.
"""

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


class Quantize(Section):
    """What `fp4pipe quantize` is told."""

    scheme: str = Field(default="nvfp4", description="preset or ModelOpt recipe: which layers, which number format")
    algorithm: str = Field(default="max", description="how scales are chosen from the calibration statistics")
    kv_cache: str = Field(default="none", description="KV cache format written to the checkpoint")
    exclude: tuple[str, ...] = Field(default=(), description="module patterns kept unquantized")
    max_shard_size: str = Field(default="5GB", description="largest safetensors file")
    device: str = Field(default="auto", description="where calibration runs")
    calibration: Calibration = Calibration()


class Audit(Section):
    """Gates of the comparison of the files on disk with the source."""

    min_sqnr_db: float = Field(
        default=15.0, description="signal to quantization noise of the worst quantized matrix, dB"
    )


class Load(Section):
    """How the checkpoint is loaded to be validated and served."""

    mode: Mode = Field(
        default="auto", description="w4a4: activations in NVFP4 too; w4a16: weights only; auto: what fits the GPU"
    )
    device: str = "auto"
    graphs: Literal["compiled", "segmented", "off"] = "compiled"
    compiler: Literal["inductor", "eager"] = "inductor"
    load_threads: int = Field(default=8, gt=0)


class Parity(Section):
    """Logits against ModelOpt's own fake-quantized model."""

    positions: int = Field(default=2000, gt=0, description="token positions compared")
    min_top1: float = Field(
        default=0.99, ge=0, le=1, description="share of positions whose most likely token is the same"
    )
    max_rel_error: float = Field(default=1e-2, gt=0, description="norm of the difference over norm of the reference")


class Perplexity(Section):
    """Perplexity of the source and of the checkpoint on the same tokens."""

    data: str = Field(default="bundled", description="`bundled` or a text file")
    tokens: int = Field(default=4096, gt=0)
    modes: tuple[Literal["w4a4", "w4a16"], ...] = ("w4a16", "w4a4")
    max_ratio: float = Field(default=1.5, gt=1, description="NVFP4 over bf16, every mode")


class Agreement(Section):
    """Next-token distributions of the checkpoint against the source's."""

    tokens: int = Field(default=2048, gt=0)
    max_kl: float = Field(default=0.3, gt=0, description="mean KL divergence, nats")
    min_top1: float = Field(default=0.7, ge=0, le=1)


class Gsm8k(Section):
    """Grade-school arithmetic, the same questions on source and checkpoint, paired verdict."""

    questions: int = Field(default=200, gt=0)
    shots: int = Field(default=8, ge=0)
    data: str | None = Field(
        default=None, description="directory with train.jsonl and test.jsonl; default: from the hub"
    )
    margin: float = Field(default=0.03, gt=0, description="loss of accuracy tolerated")


class Checks(Section):
    """What `fp4pipe validate` proves; a check that is null is not made."""

    ops: bool = True
    graphs: bool = True
    parity: Parity | None = Parity()
    perplexity: Perplexity | None = Perplexity()
    agreement: Agreement | None = Agreement()
    gsm8k: Gsm8k | None = None


class Recipe(Section):
    """A whole run: source, quantization, audit gates, loading, checks, one question through the server."""

    name: str = ""
    description: str = Field(min_length=1, description="one line, shown by `fp4pipe recipes list`")
    source: tuple[str, ...] = Field(min_length=1, description="tried in order, the first that can be reached is used")
    revision: str | None = Field(default=None, description="commit of the hub repository")
    trust_remote_code: bool = False
    quantize: Quantize = Quantize()
    audit: Audit = Audit()
    load: Load = Load()
    checks: Checks = Field(default=Checks(), alias="validate")
    ask: str | None = Field(default=None, description="chat question answered through the HTTP server at the end")

    @field_validator("source", mode="before")
    @classmethod
    def _one_source_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value
