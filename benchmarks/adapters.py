"""Adapters that come and go on a real server: no request fails, none is given another's word, a load is soon done.

    python benchmarks/adapters.py [--short] [--requests N] [--only churn|load|show] [--server llama|vllm] [--minutes N]

`churn`: 10,000 requests (1,000 with `--short`) by six agents for four names, while 20 further adapters are brought,
signed, verified, loaded and put in the place of earlier ones. `load`: an adapter of 320 MB, as one of rank 64 for a
model of 7B has it, is opened, copied, hashed and verified, and the tiny model's own one is loaded until it answers;
both together are to take 5 s at most. `show`: two tenants with an adapter each on one base, 30 agents that ask without
a pause, and every 10 s another build in the place of one, for ten minutes.

Each adapter answers one word, whatever it is asked (tests/tools/make_adapters.py), so an answer of another's is seen.
The models are the tests' tiny ones: what is measured is the way there, not the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from build_line import build_line

from hive.adapters.base_model import BaseModel
from tests.adapters.lora_files import Box, secret_pem, sign
from tests.journeys.adapter_stack import Answer, MadeAdapter, Versions, WordAsker, asking, ended, load, make
from tests.journeys.pool_stack import ON_VLLM, llama_models, pool_config, vllm_row
from tests.journeys.stack import Stack, stack

BASE, ROOM_MB, SERVER_MB, VLLM_ROOM_MB = "base", 1600, 60, 4000
NAMES = ("red", "green", "blue", "grey")
CHANGES = 20
LARGE_MB, LARGE_RANK = 320, 64
PROMISED_S = 5.0
EVERY_S = 10.0


class AdapterBench:
    """One Hive with a base model, and adapters that are brought to it signed. `is_gguf`: for llama-server."""

    def __init__(self, hive: Stack, folder: Path, base: Path, name: str, *, is_gguf: bool) -> None:
        self.hive = hive
        self.base = base
        self.name = name
        self.is_gguf = is_gguf
        self.source = folder / "source"
        self.key = folder / "team.key"
        self.key.write_bytes(secret_pem())
        self.key.chmod(0o600)
        public = folder / "team.pub"
        public.write_bytes(subprocess.check_output(["openssl", "pkey", "-in", str(self.key), "-pubout"]))
        self.run("adapter", "trust", str(public), "--state-dir", str(hive.state))
        self.versions = Versions()
        self.pull_s: list[float] = []
        self.load_s: list[float] = []
        self._made = 0

    def run(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "hive", *words], check=True, stdout=subprocess.DEVNULL)

    def made(self) -> MadeAdapter:
        """The next one, signed: each has a word of its own."""
        number = self._made
        self._made += 1
        path = self.source / (f"{number}.gguf" if self.is_gguf else str(number))
        made = make(self.base, path, number, is_gguf=self.is_gguf, base_name=self.name)
        self.run("adapter", "sign", str(made.path), "--key", str(self.key))
        return made

    def replace(self, name: str, made: MadeAdapter) -> None:
        """Brings it under this name, and loads it in the place of what has it."""
        began = time.monotonic()
        job = ended(
            self.hive, self.hive.post("/api/adapters", {"path": made.path.name, "base": self.name, "name": name})
        )
        assert job["state"] == "done", job
        self.pull_s.append(time.monotonic() - began)
        self.versions.ordered(name, made.word)
        job = load(self.hive, name, job["result"]["digest"])
        assert job["state"] == "done", job
        self.load_s.append(job["result"]["took_s"])
        self.versions.loaded(name)

    def askers(self, count: int, tenants: Sequence[str] = ("default",)) -> list[WordAsker]:
        found = []
        for number in range(count):
            self.hive.create(f"agent-{number}", "idler.py", tenant=tenants[number % len(tenants)])
            found.append(WordAsker(self.hive, f"agent-{number}"))
        return found

    def told(self, what: str, answers: list[Answer], took_s: float, changes: int) -> bool:
        """Prints what came of it; whether all was right."""
        wrong = [answer for answer in answers if not self.versions.right(answer)]
        failed = sum(answer.status != 200 for answer in wrong)
        rate, each = len(answers) / took_s, sorted(self.load_s[-changes:])
        print(
            f"{what}: {len(answers)} requests in {took_s:.0f} s ({rate:.0f}/s), {changes} changes: {failed} failed, "
            f"{len(wrong) - failed} with another's word; a load {each[len(each) // 2]:.2f} s, at most {each[-1]:.2f} s"
        )
        for answer in wrong[:3]:
            print(f"  {answer.name}: {answer.status} {answer.text[:200]!r}")
        return not wrong


@contextlib.contextmanager
def bench(server: str) -> Iterator[AdapterBench]:
    with tempfile.TemporaryDirectory(prefix="hive-adapters-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "source").mkdir()
        adapters = f"[adapters]\ndir = {folder / 'source'}\n"
        tenants = "[tenant one]\n[tenant two]\n"
        if server == "llama":
            base = llama_models(folder, [BASE])[BASE]
            row = f"[model {BASE}]\nfile = {base}\ncontext = 8192\nparallel = 4\nvram_mb = {SERVER_MB}\n"
            config, model = pool_config(ROOM_MB) + row, BASE
        else:
            program, row = vllm_row(folder)
            config, model = pool_config(VLLM_ROOM_MB, more=program) + f"{row}adapters = 8\n", ON_VLLM
            base = Path(row.partition("file = ")[2].partition("\n")[0])
        with stack(config=config + adapters + tenants, up_within_s=300) as hive:
            yield AdapterBench(hive, folder, base, model, is_gguf=server == "llama")


def churn(server: str, requests: int) -> bool:
    with bench(server) as one:
        made = [one.made() for _ in range(len(NAMES) + CHANGES)]
        for name, first in zip(NAMES, made, strict=False):
            one.replace(name, first)
        began = time.monotonic()
        with asking(one.askers(6), NAMES, at_least=requests) as answers:
            for number, following in enumerate(made[len(NAMES) :]):
                until = began + number * spread_s(requests, len(answers()), time.monotonic() - began)
                time.sleep(max(0.0, min(until - time.monotonic(), 60.0)))
                one.replace(NAMES[number % len(NAMES)], following)
        return one.told(f"churn at {server}", answers(), time.monotonic() - began, CHANGES)


def spread_s(requests: int, done: int, took_s: float) -> float:
    """Seconds between two changes, so that they are spread over all requests at the rate of so far.

    >>> spread_s(1000, 100, 10.0), spread_s(1000, 0, 0.0)
    (5.0, 0.0)
    """
    return requests * took_s / done / CHANGES if done else 0.0


def large_load() -> bool:
    """An adapter of 320 MB on its way in, and the tiny model's own one until it answers."""
    with tempfile.TemporaryDirectory(prefix="hive-adapters-", dir="/var/tmp") as name:
        box = Box(Path(name))
        inputs = (LARGE_MB << 20) // (4 * LARGE_RANK * 2)
        source = sign(large_adapter(box.beneath / "large", inputs), box.key)
        times = []
        for number in range(3):
            began = time.monotonic()
            record = box.install(source, name=f"large-{number}", base=BaseModel("tiny-base"), max_mb=4096)
            times.append(time.monotonic() - began)
        large_s = sorted(times)[1]
    with bench("llama") as one:
        one.replace("red", one.made())
        one.replace("red", one.made())
        ready_s = one.load_s[-1]
    is_kept = large_s + ready_s <= PROMISED_S
    print(
        f"load: {record.bytes >> 20} MiB opened, copied, hashed, verified and installed in {large_s:.2f} s, the tiny "
        f"one loaded in {ready_s:.2f} s: {large_s + ready_s:.2f} s of {PROMISED_S:g} s{'' if is_kept else ': TOO LONG'}"
    )
    return is_kept


def large_adapter(folder: Path, inputs: int) -> Path:
    """A directory as PEFT's: one pair of matrices of rank 64, half of the bytes each."""
    from tests.adapters.lora_files import pair, peft_adapter, safetensors

    peft_adapter(folder, rank=LARGE_RANK)
    tensors = pair(LARGE_RANK, inputs=inputs, outputs=inputs)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    return folder


def show(server: str, minutes: float) -> bool:
    """Two tenants, an adapter each, 30 agents; every 10 s another build in the place of one."""
    names = ("of-one", "of-two")
    with bench(server) as one:
        for name in names:
            one.replace(name, one.made())
        askers = one.askers(30, ("one", "two"))
        began, changes = time.monotonic(), 0
        with contextlib.ExitStack() as both:
            looks = [both.enter_context(asking(askers[at::2], (name,), at_least=1)) for at, name in enumerate(names)]
            while time.monotonic() - began < minutes * 60:
                following = one.made()
                time.sleep(max(0.0, began + changes * EVERY_S - time.monotonic()))
                one.replace(names[changes % 2], following)
                changes += 1
        answers = [answer for look in looks for answer in look()]
        return one.told(f"show at {server}, {minutes:g} minutes", answers, time.monotonic() - began, changes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="1,000 requests, and a show of one minute")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--only", choices=("churn", "load", "show"))
    parser.add_argument("--server", choices=("llama", "vllm"), default="llama")
    parser.add_argument("--minutes", type=float, default=0.0)
    args = parser.parse_args()
    print(build_line())
    requests = args.requests or (1000 if args.short else 10_000)
    minutes = args.minutes or (1.0 if args.short else 10.0)
    parts = {
        "churn": lambda: churn(args.server, requests),
        "load": large_load,
        "show": lambda: show(args.server, minutes),
    }
    kept = [part() for name, part in parts.items() if args.only in (None, name)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
