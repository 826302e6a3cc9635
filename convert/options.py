"""What a quantization is asked to do."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from fp4pipe.errors import UsageError

_SIZE = re.compile(r"[1-9]\d*[KMGT]B")


@dataclass(frozen=True)
class CalibrationOptions:
    """Which text the activation scales are measured on; see `fp4pipe.calib_data.load_calibration`.

    Attributes:
        dataset: ``bundled``, a .jsonl/.txt/.parquet path, or a data set name on the hub.
        samples: Number of samples.
        seq_len: Tokens a sample.
        seed: Which texts are drawn, and in what order.
        batch_size: Samples of equal length run together.
        split: Split of a hub data set.
        text_column: Column that holds the text.
        chat_template: Render dialogues through the model's chat template.
    """

    dataset: str = "bundled"
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    batch_size: int = 8
    split: str | None = None
    text_column: str | None = None
    chat_template: bool = True


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize.

    Attributes:
        scheme: A ModelOpt preset (``nvfp4``), the name of one of its recipes, or the path of a recipe YAML.
        algorithm: How scales are chosen; ``max`` takes the largest magnitude seen.
        kv_cache: ``none``, ``fp8`` (calibrated scales) or ``fp8_cast`` (scale 1). A ModelOpt recipe that says something
            about the KV cache itself is followed when this is ``none``.
        exclude: Globs of modules kept as they are (``lm_head``, ``model.layers.0.*``, ``*.down_proj``).
        calibration: The text.
        max_shard_size: Largest safetensors file (``5GB``).
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        UsageError: `max_shard_size` is no size.
    """

    scheme: str = "nvfp4"
    algorithm: str = "max"
    kv_cache: str = "none"
    exclude: tuple[str, ...] = ()
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    max_shard_size: str = "5GB"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not _SIZE.fullmatch(self.max_shard_size):
            raise UsageError(f"max_shard_size {self.max_shard_size!r} is no size", fix="5GB, 500MB")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
