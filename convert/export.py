"""Writing the checkpoint: ModelOpt's exporter, the mending of what it leaves, and the files it does not write."""

import shutil
from pathlib import Path

import torch
from torch import nn

from fp4pipe.convert.mend import mend_config, mend_tensors
from fp4pipe.convert.model import source_dtype
from fp4pipe.convert.quiet import quiet
from fp4pipe.convert.source import Source
from fp4pipe.shards import INDEX

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_COPIED_FOLDERS = ("additional_chat_templates",)
_NOT_COPIED = ("config.json", "hf_quant_config.json", "provenance.json", INDEX)


def export(model: nn.Module, source: Source, directory: Path, *, max_shard_size: str) -> None:
    """Export the calibrated `model` to `directory`. The model is unusable afterwards: its weights become codes."""
    with quiet(), torch.no_grad():
        from modelopt.torch.export import export_hf_checkpoint

        export_hf_checkpoint(model, dtype=source_dtype(source), export_dir=directory, max_shard_size=max_shard_size)
    mend_tensors(directory, source)
    mend_config(directory, source)
    copy_files(source, directory)


def copy_files(source: Source, directory: Path) -> None:
    """Copy what belongs to the model byte for byte: tokenizer, chat templates, generation config, code, licence."""
    for pattern in _COPIED:
        for path in source.path.glob(pattern):
            if path.is_file() and path.name not in _NOT_COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, directory / path.name)
    for folder in _COPIED_FOLDERS:
        if (source.path / folder).is_dir():
            shutil.copytree(source.path / folder, directory / folder, dirs_exist_ok=True)
