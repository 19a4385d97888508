"""The kinds of inference server: one file a kind, and how servers are asked, started and switched.

May import: leaves, models, dialects; what asks servers: host and store too, and the proxy never imports it.
Begin with spec.py, then vllm.py.
"""
