"""The structural rules: what `fp4pipe.checkpoint.survey` finds and `Checkpoint.open` refuses.

Each is declared here by the name that a `Problem` carries.
"""

from fp4pipe.lint.rules import declare

_AGAIN = "download, copy or export the checkpoint again"
_EXPORT = "export the checkpoint again"

for _id, _sentence, _fix in (
    ("directory-missing", "The checkpoint is a directory.", "give the path of a checkpoint directory"),
    ("export-unfinished", "The export ran to its end.", "run the command that wrote it again"),
    ("config-invalid", "config.json is there and holds a JSON object.", _AGAIN),
    ("weights-absent", "The weights are safetensors files.", "convert them with transformers' save_pretrained"),
    ("index-invalid", "Several files come with an index that names files beside it.", _AGAIN),
    ("file-damaged", "Each file's header is sound and its tensors tile the file.", _AGAIN),
    ("file-missing", "Every file that the index names is there.", _AGAIN),
    ("file-unlisted", "Every weight file is named by the index.", "remove the file, or list its tensors in the index"),
    ("tensor-missing", "Every tensor that the index lists is in its file.", _AGAIN),
    ("tensor-unlisted", "Every tensor is listed in the index.", "list it in the index, or remove it"),
    ("tensor-duplicate", "Every tensor is in one file only.", "remove one of the two"),
    ("index-wrong-file", "The index places every tensor in the file that holds it.", "correct the index"),
    (
        "quant-config-invalid",
        "The quantization configs can be read and agree with each other.",
        "correct the wrong one, or delete hf_quant_config.json if config.json is right",
    ),
    (
        "config-absent",
        "A checkpoint with packed weights says how they are quantized.",
        "restore quantization_config in config.json, or hf_quant_config.json, from the exporter",
    ),
    ("group-size", "NVFP4 has 16 columns a block scale.", _EXPORT),
    ("nothing-quantized", "A config that says NVFP4 comes with NVFP4 weights.", _EXPORT),
    ("fused-partly-excluded", "A fused module is excluded as a whole or not at all.", "complete the exclude list"),
    ("linear-shape", "A quantized matrix has a multiple of 16 columns.", _EXPORT),
    ("scale-missing", "Every quantized matrix has all its scales.", _EXPORT),
    ("scale-shape", "Every scale has the dtype and shape of the format.", _EXPORT),
    (
        "excluded-but-quantized",
        "What the config excludes is not quantized in the files.",
        "take the module off the exclude list",
    ),
    (
        "unquantized-not-excluded",
        "What the files hold unquantized is excluded in the config.",
        "add the module to the exclude list, or export it quantized",
    ),
):
    declare(_id, "error", _sentence, _fix)
