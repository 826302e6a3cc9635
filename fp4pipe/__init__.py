"""From a Hugging Face causal LM to a validated, servable NVFP4 deployment."""

__version__ = "0.1.0"
