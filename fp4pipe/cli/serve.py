"""`fp4pipe serve`: an OpenAI-compatible server over a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from fp4pipe.cli.outcome import Outcome


def serve(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="NVFP4 checkpoint, or an unquantized model.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="FP4PIPE_API_KEY", show_envvar=True, help="Bearer token requests must carry.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name requests use; default: the checkpoint directory's.")
    ] = None,
    max_queued: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more are answered 429.")] = 512,
    mode: Annotated[str, typer.Option(help="w4a4, w4a16, or auto: what the device does natively.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Compute type; auto: float32 on a CPU, else the checkpoint's.")] = "auto",
    graphs: Annotated[str, typer.Option(help="compiled, segmented or off.")] = "compiled",
    compiler: Annotated[str, typer.Option(help="Of compiled graphs: inductor or eager.")] = "inductor",
    fp4_gemm_backend: Annotated[
        str, typer.Option(help="Kernels of w4a4 products on Blackwell: auto, cutlass, cudnn, trtllm, cute-dsl ...")
    ] = "auto",
    prefill: Annotated[
        str, typer.Option(help="bf16; or fp8: faster prompts on Hopper in w4a16, approximate.")
    ] = "bf16",
    lm_head: Annotated[
        str, typer.Option(help="bf16: as the checkpoint has it; fp8 or nvfp4: quantized at load, approximate.")
    ] = "bf16",
    load_threads: Annotated[int, typer.Option(min=1, help="Threads that read the weights.")] = 8,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences computed at the same time at most.")] = 64,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens computed in one step at most; default: 512 on a CPU, 8192 on a GPU."),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens the KV cache holds; default: from the memory that is free.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse keys and values of prompts that begin alike.")] = True,
) -> Outcome:
    """Serve CKPT over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    from fp4pipe.runtime.serve import ServeSettings
    from fp4pipe.runtime.serve import serve as serve_checkpoint

    settings = ServeSettings(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        max_queued=max_queued,
        engine={
            "mode": mode,
            "device": device,
            "dtype": dtype,
            "graphs": graphs,
            "compiler": compiler,
            "fp4_gemm_backend": fp4_gemm_backend,
            "prefill": prefill,
            "lm_head": lm_head,
            "load_threads": load_threads,
            "max_running": max_running,
            "chunk_tokens": chunk_tokens,
            "kv_tokens": kv_tokens,
            "page_size": page_size,
            "prefix_cache": prefix_cache,
        },
    )
    serve_checkpoint(checkpoint, settings)
    return Outcome({"served": checkpoint, "stopped": True})
