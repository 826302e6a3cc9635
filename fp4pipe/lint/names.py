"""Rules about which tensors and modules there are, and about the configs that describe them."""

import re
from collections.abc import Iterator

from fp4pipe.checkpoint import Checkpoint
from fp4pipe.exclusions import compiled, fused_of, shards_of
from fp4pipe.lint.rules import Hit, rule
from fp4pipe.quant_config import NVFP4_ALGOS
from fp4pipe.quantized_linear import FLOATING, looks_like_embedding

_SCALE_LEAVES = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
_SENSITIVE = re.compile(
    r"(^|\.)(router|gate|shared_expert_gate|conv1d|lm_head|mtp|visual|vision_tower|vision_model|multi_modal_projector)(\.|$)"
)


@rule(
    "scale-stray",
    "error",
    "Every scale belongs to a quantized matrix.",
    fix="remove the scale, or restore the quantized weight it belongs to",
)
def scale_stray(checkpoint: Checkpoint) -> Iterator[Hit]:
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf not in _SCALE_LEAVES:
            continue
        weights = [checkpoint.tensors.get(f"{module}.{weight}") for weight in ("weight", "weight_packed")]
        held = next((info.dtype for info in weights if info), None)
        if held is None:
            yield name, f"{module} has no weight"
        elif held in FLOATING:
            yield name, f"{module}.weight is {held}"


@rule(
    "quantizer-state-leaked",
    "error",
    "No state of the exporter's quantizers is among the weights.",
    fix="export the checkpoint again",
)
def quantizer_state_leaked(checkpoint: Checkpoint) -> Iterator[Hit]:
    for name in checkpoint.tensors:
        if "_quantizer." in name or name.endswith("_quantizer"):
            yield name, "is a quantizer's, not the model's"


@rule(
    "sensitive-quantized",
    "warning",
    "Routers, heads, convolutions, vision parts and draft layers are left unquantized.",
    fix="exclude the module when quantizing, unless an evaluation says it does no harm",
)
def sensitive_quantized(checkpoint: Checkpoint) -> Iterator[Hit]:
    for module, linear in checkpoint.linears.items():
        if _SENSITIVE.search(module) or looks_like_embedding(module):
            yield module, f"is NVFP4 [{linear.out_features}, {linear.in_features}]"


@rule(
    "exclusion-unused",
    "info",
    "Every exclude pattern means at least one unquantized module.",
    fix="remove the pattern, or correct its spelling if it was meant for a module here",
)
def exclusion_unused(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.quant is None:
        return
    kept = {name.rpartition(".")[0] for name in checkpoint.tensors} - checkpoint.linears.keys()
    spellings = {name for module in kept for name in (module, fused_of(module), *shards_of(module)) if name}
    if setting(checkpoint, "tie_word_embeddings"):
        spellings.add("lm_head")  # exporters list the head whether or not it is stored
    for pattern in checkpoint.quant.ignore:
        if not any(map(compiled((pattern,)).match, spellings)):
            yield pattern, "matches no unquantized module"


@rule(
    "config-json-silent",
    "info",
    "config.json itself says how the checkpoint is quantized.",
    fix="copy the quantization of hf_quant_config.json into config.json: many loaders look only there",
)
def config_json_silent(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.quant is not None and checkpoint.quant.source != "config.json":
        yield "config.json", "has no quantization_config; hf_quant_config.json has"


@rule(
    "group-size-unstated",
    "warning",
    "The config of an NVFP4 checkpoint states its group size.",
    fix='add "group_size": 16 to quantization_config',
)
def group_size_unstated(checkpoint: Checkpoint) -> Iterator[Hit]:
    quant = checkpoint.quant
    if quant is not None and quant.algo in NVFP4_ALGOS and quant.group_size is None:
        yield quant.source, f"says {quant.algo} and no group_size"


@rule(
    "pre-quant-scale-unstated",
    "error",
    "Factors on a linear's input come with a config that says so.",
    fix='set quant_algo to "NVFP4_AWQ"',
)
def pre_quant_scale_unstated(checkpoint: Checkpoint) -> Iterator[Hit]:
    for module, linear in checkpoint.linears.items():
        algo = checkpoint.quant.algo_of(module) if checkpoint.quant else None
        if linear.pre_quant_scale is not None and algo not in ("NVFP4_AWQ", "NVFP4_SVD"):
            yield linear.pre_quant_scale.name, f"the config says {algo}, and its loader would ignore this tensor"


@rule(
    "head-tied",
    "error",
    "A model whose head is tied to its embedding stores no head of its own.",
    fix='set "tie_word_embeddings": false in config.json',
)
def head_tied(checkpoint: Checkpoint) -> Iterator[Hit]:
    if not setting(checkpoint, "tie_word_embeddings"):
        return
    for name, info in checkpoint.tensors.items():
        if not name.endswith("lm_head.weight") and not name.endswith("lm_head.weight_packed"):
            continue
        embedding = next((i for n, i in checkpoint.tensors.items() if n.endswith("embed_tokens.weight")), None)
        if info.dtype not in FLOATING:
            yield name, f"is {info.dtype}: a loader that ties it would drop it and use the embedding"
        elif embedding is not None and (info.dtype, info.shape) != (embedding.dtype, embedding.shape):
            yield name, f"is {info.dtype} {list(info.shape)}, the embedding {embedding.dtype} {list(embedding.shape)}"


@rule(
    "head-missing",
    "error",
    "A causal language model whose head is not tied has one.",
    fix='export the head, or set "tie_word_embeddings": true in config.json if it is the embedding',
)
def head_missing(checkpoint: Checkpoint) -> Iterator[Hit]:
    causal = "CausalLM" in str(checkpoint.config.get("architectures"))
    heads = ("lm_head", "embed_out", "output", "output_layer")
    named = any(part in heads for name in checkpoint.tensors for part in name.split("."))
    if causal and setting(checkpoint, "tie_word_embeddings") is False and not named:
        yield "lm_head.weight", "no head among the tensors, and tie_word_embeddings is false"


@rule(
    "dimensions-odd",
    "info",
    "Both dimensions of a quantized matrix are multiples of 32.",
    fix="nothing to mend here; kernels that need it pad, and tensor parallelism splits less evenly",
)
def dimensions_odd(checkpoint: Checkpoint) -> Iterator[Hit]:
    for module, linear in checkpoint.linears.items():
        if linear.out_features % 32 or linear.in_features % 32:
            yield module, f"is {linear.out_features} x {linear.in_features}"


@rule(
    "columns-not-quantizable",
    "info",
    "A linear has a multiple of 16 columns, or it cannot be NVFP4.",
    fix="nothing to mend: the module stays in its original precision",
)
def columns_not_quantizable(checkpoint: Checkpoint) -> Iterator[Hit]:
    if checkpoint.quant is None:
        return
    for name, info in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and info.dtype in FLOATING and len(info.shape) == 2 and info.shape[1] % 16:
            yield module, f"is {info.shape[0]} x {info.shape[1]} in {info.dtype}"


def setting(checkpoint: Checkpoint, key: str) -> object:
    """A model setting, also where a composite model keeps it."""
    text = checkpoint.config.get("text_config")
    return checkpoint.config.get(key, text.get(key) if isinstance(text, dict) else None)
