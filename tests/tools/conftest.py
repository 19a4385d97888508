"""Programs that run in vLLM's own environment are no modules to be imported here."""

collect_ignore = ["make_tiny_hf_model.py", "serve_vllm.py"]
