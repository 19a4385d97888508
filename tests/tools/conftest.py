"""A program that runs in vLLM's own environment is no module to be imported here."""

collect_ignore = ["make_tiny_hf_model.py"]
