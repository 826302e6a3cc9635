"""Hugging Face causal LM in, NVFP4 checkpoint out."""
