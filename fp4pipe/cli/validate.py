"""`fp4pipe validate`: prove a checkpoint, measure what quantization cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4pipe import console
from fp4pipe.cli.outcome import Outcome
from fp4pipe.cli.reports import write_report
from fp4pipe.cli.sources import source_of
from fp4pipe.cli.tables import show_checks
from fp4pipe.errors import UsageError

if TYPE_CHECKING:
    from fp4pipe.checkpoint import Checkpoint


def validate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="NVFP4 checkpoint, or any model the runtime loads.")
    ],
    ops: Annotated[bool, typer.Option("--ops", help="Operators against float64 and against the files.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Captured pieces against the model run eagerly.")] = False,
    parity: Annotated[
        bool, typer.Option("--parity", help="Logits against ModelOpt's own fake-quantized model.")
    ] = False,
    perplexity: Annotated[bool, typer.Option("--perplexity", help="Perplexity, and the source's.")] = False,
    agreement: Annotated[bool, typer.Option("--agreement", help="KL and top-1 against the source.")] = False,
    gsm8k: Annotated[bool, typer.Option("--gsm8k", help="GSM8K, paired with the source.")] = False,
    baseline: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The unquantized model; default: the one in provenance.json.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="w4a4, w4a16 or auto; may be repeated. Default: the activations the checkpoint was made for."
        ),
    ] = None,
    positions: Annotated[int, typer.Option(min=1, help="Token positions --parity compares.")] = 2000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens --perplexity and --agreement score.")] = 2048,
    text: Annotated[
        str, typer.Option(help="bundled, or a text file, for --parity, --perplexity, --agreement.")
    ] = "bundled",
    questions: Annotated[int | None, typer.Option(min=1, help="GSM8K questions; default: all 1,319.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Worked examples in the prompt; default: the style's.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of train.jsonl and test.jsonl; default: the hub.")
    ] = None,
    style: Annotated[str, typer.Option(help="GSM8K prompt, stops and parser: ours or sglang.")] = "ours",
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of a GSM8K answer.")] = 512,
    in_flight: Annotated[int, typer.Option(min=1, help="GSM8K questions in the engine at once.")] = 64,
    margin: Annotated[float, typer.Option(help="Loss of GSM8K accuracy tolerated, as a share.")] = 0.02,
    buckets: Annotated[int | None, typer.Option(min=1, help="Token buckets --graphs tries; default: all.")] = None,
    gate: Annotated[
        list[str] | None, typer.Option(metavar="FIGURE=BOUND", help="As 'perplexity.ratio=<=1.1'; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Compute type; auto: float32 on a CPU, else the checkpoint's.")] = "auto",
    runner: Annotated[str, typer.Option(help="Graphs of the engines: compiled, segmented or off.")] = "compiled",
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
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens the KV cache holds; default: from free memory.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random inputs and of the choice of questions.")] = 0,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.html and report.json there.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the source.")
    ] = False,
) -> Outcome:
    """Prove CKPT. With no check named: --ops --graphs --perplexity, and with a source --parity --agreement."""
    from fp4pipe.checkpoint import Checkpoint
    from fp4pipe.runtime.validate import Gsm8kOptions, ValidateOptions
    from fp4pipe.runtime.validate import validate as validate_checkpoint

    opened = Checkpoint.open(checkpoint)
    asked = ops or graphs or parity or perplexity or agreement or gsm8k
    source = None
    if not asked or baseline or parity or agreement or gsm8k or perplexity:
        source = source_of(opened, baseline, required=parity or agreement, trust_remote_code=trust_remote_code)
    if not asked:
        ops = graphs = perplexity = True
        parity, agreement = source is not None and bool(opened.linears), source is not None
    options = ValidateOptions(
        ops=ops,
        graphs=graphs,
        parity_positions=positions if parity else 0,
        perplexity_tokens=tokens if perplexity else 0,
        agreement_tokens=tokens if agreement else 0,
        gsm8k=Gsm8kOptions(
            data=data,
            questions=questions,
            shots=shots,
            style=style,  # type: ignore[arg-type]  # `require` refuses unknown ones
            seed=seed,
            max_tokens=max_tokens,
            in_flight=in_flight,
            margin=margin,
            answers=report,
        )
        if gsm8k
        else None,
        modes=tuple(mode or [_own_mode(opened)]),
        device=device,
        dtype=dtype,
        runner=runner,
        compiler=compiler,
        fp4_gemm_backend=fp4_gemm_backend,
        prefill=prefill,
        lm_head=lm_head,
        load_threads=load_threads,
        kv_tokens=kv_tokens,
        buckets=buckets,
        text=text,
        seed=seed,
        gates=dict(map(_gate, gate or ())),
    )
    options.require(reference=source is not None, baseline=source is not None)
    result = validate_checkpoint(
        checkpoint,
        options,
        reference=_reference(source.path, checkpoint, trust_remote_code) if parity and source else None,
        baseline_path=source.path if source else None,
    )
    show_checks(result)
    document: dict[str, Any] = result.to_dict()
    if report:
        document["report"] = write_report(report, document)
        console.say(f"report: {document['report'].with_suffix('.html')}, the same as data in {document['report']}")
    return Outcome(document, failed=tuple(result.failures))


def _reference(source: Path, checkpoint: Path, trust_remote_code: bool) -> Any:
    from fp4pipe.convert.reference import ModelOptReference

    console.say("loading ModelOpt's fake-quantized model ...")
    return ModelOptReference(source, checkpoint, activations=False, trust_remote_code=trust_remote_code)


def _own_mode(checkpoint: "Checkpoint") -> str:
    """The numerics the checkpoint was made for; w4a4 is emulated where it must be, and shows Blackwell's accuracy."""
    if not checkpoint.linears:
        return "auto"
    return "w4a4" if all(linear.input_scale for linear in checkpoint.linears.values()) else "w4a16"


def _gate(text: str) -> tuple[str, str]:
    name, equals, bound = text.partition("=")
    if not equals or not name or not bound:
        raise UsageError(f"--gate {text!r} is not FIGURE=BOUND", fix="--gate 'perplexity.ratio=<=1.1'")
    return name, bound
