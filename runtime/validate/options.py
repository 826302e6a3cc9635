"""What a validation run is asked to prove."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fp4pipe.errors import UsageError
from fp4pipe.runtime.validate.gates import check_names
from fp4pipe.runtime.validate.gsm8k import DEFAULT_SHOTS, Style
from fp4pipe.runtime.validate.text import BUNDLED


@dataclass(frozen=True, slots=True)
class Gsm8kOptions:
    """One run over GSM8K."""

    data: str | Path | None = None
    """Directory with train.jsonl and test.jsonl; None for the hub."""
    questions: int | None = None
    """None for all 1,319."""
    shots: int | None = None
    """None for the style's own number."""
    style: Style = "ours"
    seed: int = 0
    max_tokens: int = 512
    in_flight: int = 64
    """Questions in the engine at once; at most 500."""
    margin: float = 0.02
    """Loss of accuracy, as a share of questions, that is tolerated."""
    answers: Path | None = None
    """Directory where answers are stored as they come; a run that was cut short goes on from there."""


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What to check, in which numerics, on which runner. A check that is not asked for is not made."""

    ops: bool = False
    graphs: bool = False
    parity_positions: int = 0
    """Token positions to compare with the reference; 0 for no parity check."""
    perplexity_tokens: int = 0
    """Tokens of text to score; 0 for no perplexity."""
    agreement_tokens: int = 0
    """Token positions to compare with the baseline; 0 for no agreement."""
    gsm8k: Gsm8kOptions | None = None
    modes: tuple[str, ...] = ("auto",)
    """Numerics to validate in, one after the other: ``w4a4``, ``w4a16`` or ``auto``."""
    device: str = "auto"
    dtype: str = "auto"
    runner: str = "compiled"
    """Graphs of the engines: ``compiled``, ``segmented`` or ``off``."""
    compiler: str = "inductor"
    fp4_gemm_backend: str = "auto"
    prefill: str = "bf16"
    lm_head: str = "bf16"
    """Kernels the engines of the checkpoint run: see `KernelChoices`."""
    load_threads: int = 8
    kv_tokens: int | None = None
    """Tokens each engine's KV cache holds; None for what the sequences that run at a time need."""
    buckets: int | None = None
    """How many buckets `graphs` tries; None for all."""
    text: str | Path = BUNDLED
    """UTF-8 text for parity, perplexity and agreement."""
    window: int = 512
    """Tokens scored in one piece."""
    seed: int = 0
    gates: Mapping[str, str] = field(default_factory=dict)
    """Bounds on figures: see `gates`."""
    progress: bool = True

    @property
    def steps(self) -> list[str]:
        """The checks asked for."""
        asked = {
            "ops": self.ops,
            "graphs": self.graphs,
            "parity": self.parity_positions,
            "perplexity": self.perplexity_tokens,
            "agreement": self.agreement_tokens,
            "gsm8k": self.gsm8k,
        }
        return [name for name, wanted in asked.items() if wanted]

    def require(self, *, reference: bool, baseline: bool) -> None:
        """Refuse, before anything is loaded, what could not be carried out.

        Args:
            reference: Whether there is an independent implementation to compare with.
            baseline: Whether the unquantized source is at hand.

        Raises:
            UsageError: Nothing to do, a check without what it compares with, or a gate on a check not asked for.
        """
        if not self.steps:
            raise UsageError("nothing to validate", fix="--ops --graphs --parity --perplexity --agreement --gsm8k")
        if self.parity_positions and not reference:
            raise UsageError("--parity needs the model that was quantized", fix="--baseline SOURCE")
        if self.agreement_tokens and not baseline:
            raise UsageError("--agreement compares with the unquantized source", fix="--baseline SOURCE")
        if not self.modes or len(set(self.modes)) != len(self.modes):
            raise UsageError(f"--mode {' '.join(self.modes)} names no mode, or one twice")
        if self.gsm8k and not 1 <= self.gsm8k.in_flight <= 500:
            raise UsageError(f"--in-flight {self.gsm8k.in_flight}: from 1 to 500")
        if self.gsm8k and self.gsm8k.style not in DEFAULT_SHOTS:
            raise UsageError(f"--style {self.gsm8k.style} is unknown", fix="--style " + "|".join(DEFAULT_SHOTS))
        check_names(self.gates, self.steps)
