"""vLLM's server for OpenAI's dialect, whose engine is a fork of it; runs in vLLM's own environment.

On a CPU vLLM begins its engine's process anew, which imports torch and vLLM a second time: 10 s of CPU time of a start.
"""

import multiprocessing
import runpy

from vllm.utils import system_utils

if __name__ == "__main__":
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
