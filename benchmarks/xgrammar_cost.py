"""Costs of schemas to the loops of a vLLM, each measured alone; for grammar.py, by the Python of a vLLM's environment.

`python xgrammar_cost.py MODEL VOCABULARY`: reads one schema a line (JSON), prints one line for each: `parse`, what the
process that answers spends on it in its loop; `fill` and `accept`, the most that the engine's loop spends on one token;
`compile`, what a thread beside the engine's loop spends. All in ms of CPU time, so that a busy machine changes little.
"""

import json
import random
import sys
import time

import numpy
import xgrammar
from transformers import AutoTokenizer

TOKENS = 60


def least_ms(work):
    """CPU time of this thread, the least of three."""
    spent = []
    for _ in range(3):
        begun = time.thread_time_ns()
        work()
        spent.append((time.thread_time_ns() - begun) / 1e6)
    return min(spent)


def main(model: str, vocabulary: str) -> None:
    size = int(vocabulary)
    known = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(model), vocab_size=size)
    compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, size)
    for line in sys.stdin:
        begun = time.process_time_ns()
        grammar = compiler.compile_json_schema(line)
        compiled = (time.process_time_ns() - begun) / 1e6
        fill, accept = followed(xgrammar.GrammarMatcher(grammar), bits)
        parse = least_ms(lambda text=line: xgrammar.Grammar.from_json_schema(text))
        print(json.dumps({"parse": parse, "fill": fill, "accept": accept, "compile": compiled}), flush=True)


def followed(matcher, bits):
    """The dearest token of an answer of random ones: to tell what may follow, and to take it."""
    dice, fills, accepts = random.Random(1), [0.0], [0.0]
    for _ in range(TOKENS):
        if matcher.is_terminated():
            break
        fills.append(least_ms(lambda: matcher.fill_next_token_bitmask(bits)))
        allowed = numpy.flatnonzero(numpy.unpackbits(bits.numpy().view("uint8")[0], bitorder="little"))
        token = int(dice.choice(allowed))
        begun = time.thread_time_ns()
        matcher.accept_token(token)
        accepts.append((time.thread_time_ns() - begun) / 1e6)
    return max(fills), max(accepts)


if __name__ == "__main__":
    main(*sys.argv[1:])
