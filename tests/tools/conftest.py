"""Programs that run in environments of their own (vLLM's, diffusers') are no modules to be imported here."""

collect_ignore = ["make_tiny_hf_model.py", "make_tiny_pipeline.py", "serve_vllm.py", "serve_vllm_nodes.py"]
