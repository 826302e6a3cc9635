"""A checkpoint as a model that runs: Hugging Face's own modules, with NVFP4 linears and paged attention in them."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.device import pick_device
from fp4pipe.errors import UsageError
from fp4pipe.quant_config import QuantConfig
from fp4pipe.runtime import build
from fp4pipe.runtime.cache import KVCache, LayerKV
from fp4pipe.runtime.fill import fill, refuse_unsupported
from fp4pipe.runtime.ops import KernelChoices, has_native_fp4, quantize_head, resolve_mode

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


class Model:
    """A causal language model ready to run one packed step at a time.

    Attributes:
        config: transformers' configuration.
        quant: How the checkpoint is quantized; None when it is not.
        mode: ``w4a4`` or ``w4a16``.
        device, dtype: Where and in which type activations are computed.
        kv_layers: What each layer caches.
        load_report: Seconds, bytes and the like of loading.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        quant: QuantConfig | None,
        mode: str,
        device: torch.device,
        dtype: torch.dtype,
        kv_layers: list[LayerKV],
        load_report: dict[str, Any],
    ) -> None:
        self.config: PretrainedConfig = module.config
        self.quant = quant
        self.mode = mode
        self.device = device
        self.dtype = dtype
        self.kv_layers = kv_layers
        self.load_report = load_report
        text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_context: int = text.max_position_embeddings
        self.decoder: nn.Module = module.base_model
        self._head = _head_only(module)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mode: str = "auto",
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        load_threads: int = 8,
        progress: bool = True,
        fp4_gemm_backend: str = "auto",
        prefill: str = "bf16",
        lm_head: str = "bf16",
    ) -> "Model":
        """Read a checkpoint, quantized or not, strictly: every tensor is used once and none is missing.

        Args:
            path: Directory of a Hugging Face model or of an NVFP4 checkpoint.
            mode: Numerics of the quantized layers; ``auto`` takes what the device does natively.
            device: Where the model runs.
            dtype: Of activations and unquantized weights; ``auto`` is float32 on a CPU, else the config's own.
            load_threads: Threads that read the files.
            progress: Whether to show a bar.
            fp4_gemm_backend, prefill, lm_head: See `KernelChoices`.

        Raises:
            CheckpointError: The checkpoint is damaged or does not fit its configuration.
            Unavailable: The runtime does not run this kind of model, or the device not these kernels; raised before
                any weight is read.
            UsageError: A value that is unknown or does not go with the others.
        """
        started = time.perf_counter()
        path, device = Path(path), pick_device(str(device))
        config = build.read_config(path)
        checkpoint = Checkpoint.open(path)
        refuse_unsupported(checkpoint)
        resolved = _resolve_dtype(dtype, config, device)
        mode, why = resolve_mode(mode, device)
        choices = KernelChoices(fp4_gemm_backend, prefill, lm_head)
        choices.require(mode, device, quantized=bool(checkpoint.linears))
        if has_native_fp4(device):
            from fp4pipe.runtime.ops import blackwell

            blackwell.select_gemm_backend(fp4_gemm_backend)
        module = build.build_on_meta(config, resolved)
        linears = build.replace_linears(module, checkpoint.linears, mode, resolved)
        kv_layers = build.kv_layers_of(module)
        build.recompute_buffers(module, device)
        read = fill(
            module,
            linears,
            checkpoint,
            device=device,
            dtype=resolved,
            threads=load_threads,
            progress=progress,
            fp8_prefill=prefill == "fp8",
        )
        if lm_head != "bf16":
            module.set_output_embeddings(quantize_head(module.get_output_embeddings(), lm_head))
        return cls(
            module,
            quant=checkpoint.quant,
            mode=mode,
            device=device,
            dtype=resolved,
            kv_layers=kv_layers,
            load_report={
                "seconds": time.perf_counter() - started,
                "read": read.to_dict(),
                "mode": why,
                "quantized_linears": len(linears),
                "kernels": asdict(choices),
            },
        )

    def new_cache(self, num_pages: int, page_size: int) -> KVCache:
        """A cache for this model's layers, in its dtype, on its device."""
        return KVCache(self.kv_layers, num_pages, page_size, self.dtype, self.device)

    def body(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states ``[1, T, H]`` after the final norm, of int64 ``[1, T]`` ids and positions.

        Call it under `attention.attending`, which tells its attention which tokens belong together.
        """
        return self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[R, V]`` of hidden rows ``[R, H]``, by the model's own head (scaling and softcap included)."""
        return self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0].float()


class _Rows(nn.Module):
    """Stands in for the decoder, so that the head's own forward runs on rows already computed."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]


def _head_only(module: PreTrainedModel) -> PreTrainedModel:
    """`module` with its decoder taken out: what transformers computes from the last hidden state, and nothing else."""
    setattr(module, module.base_model_prefix, _Rows())
    return module


def _resolve_dtype(dtype: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise UsageError(f"--dtype {dtype} is unknown", fix=f"--dtype auto|{'|'.join(_DTYPES)}")
    if device.type == "cpu":
        return torch.float32
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
