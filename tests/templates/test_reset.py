"""An agent finds itself to be the same, whether it was started as a program or forked from its template."""

from __future__ import annotations

import os

import pytest

from hive.domain import Limits
from hive.runtimes.process import ProcessRuntime
from hive.settings.table import Paths
from tests.sandbox.harness import A, template, template_spec
from tests.templates.comparing import compared, run, spoilt


@pytest.mark.cgroup
@pytest.mark.parametrize(
    ("form", "env"),
    [
        (["FILE", "a", "-b"], {}),
        (["FILE"], {"PYTHONUNBUFFERED": "1", "TZ": "Asia/Tokyo", "PYTHONIOENCODING": "latin-1:replace"}),
        (["-m", "facts", "a"], {"PYTHONDONTWRITEBYTECODE": "1"}),
        (["-c", "import facts", "a"], {"PYTHONPATH": ""}),
    ],
    ids=["file", "unbuffered", "module", "code"],
)
async def test_a_child_finds_the_same_as_a_program(
    processes: ProcessRuntime, paths: Paths, form: list[str], env: dict[str, str]
) -> None:
    """Descriptors, signals, umask, directory, arguments, sys.path, `__main__`, environment, buffering, timers, session,
    limits, dumpable, locale, time zone, logging: line by line."""
    packages = paths.state / "packages"
    command = [str(packages / "facts.py") if word == "FILE" else word for word in form]
    if env.get("PYTHONPATH") == "":
        env = {"PYTHONPATH": f"{packages}:/nowhere"}
    spec = spoilt(paths, command, env=env, limits=Limits(files=123))
    assert await compared(processes, spec) == ""


@pytest.mark.wide
@pytest.mark.parametrize(
    "code",
    [
        "1/0",
        "import sys; sys.exit('over')",
        "import sys; sys.exit(3)",
        "def f(): raise KeyError('k')\nf()",
        "x = (",
        "raise KeyboardInterrupt",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start(); print('main')",
        "import atexit; atexit.register(print, 'exit'); print('main')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; print('lost'); os._exit(4)",
        "import spoilt; spoilt.logging.getLogger('spoilt').error('told')",
        "import spoilt; print(spoilt.seeded.random())",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.path[0:1], sys.argv)'])",
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        "  p = m.get_context('spawn').Process(target=print, args=(1,)); p.start(); p.join(); print(p.exitcode)",
    ],
)
@pytest.mark.cgroup
async def test_a_child_ends_as_a_program_does(processes: ProcessRuntime, paths: Paths, code: str) -> None:
    """Its traceback, its exit code or signal, its threads and what it does at its end."""
    (paths.state / "end.py").write_text(code)
    assert await compared(processes, spoilt(paths, [str(paths.state / "end.py")])) == ""


@pytest.mark.cgroup
@pytest.mark.parametrize("command", [["/nowhere/agent.py"], ["-m", "no_such_module"], ["-c", "import spoilt_not"]])
async def test_what_is_missing_is_told_as_python_tells_it(
    processes: ProcessRuntime, paths: Paths, command: list[str]
) -> None:
    assert await compared(processes, spoilt(paths, command)) == ""


@pytest.mark.cgroup
async def test_two_children_draw_different_numbers(processes: ProcessRuntime, paths: Paths) -> None:
    """Of `random`, and of a generator that a package made without a seed; names and keys too. hash() is the same."""
    code = (
        "import multiprocessing, os, random, secrets, spoilt, tempfile, uuid\n"
        "print(random.random(), spoilt.own.random(), secrets.token_hex(8), uuid.uuid4(), os.urandom(8).hex(),\n"
        "  next(tempfile._get_candidate_names()), bytes(multiprocessing.current_process().authkey).hex())"
    )
    spec = spoilt(paths, ["-c", code])
    one, other = (await run(processes, spec, forked=True), await run(processes, spec, forked=True))
    assert len(one.split()) == len(other.split()) == 10
    assert not {*one.split()[:7]} & {*other.split()[:7]}


@pytest.mark.cgroup
async def test_numpys_numbers_differ_too(processes: ProcessRuntime, paths: Paths) -> None:
    numpy = pytest.importorskip("numpy")
    packages = os.path.dirname(os.path.dirname(numpy.__file__))
    env = {"PYTHONPATH": packages}
    spec = template_spec(
        paths,
        A,
        ["-c", "import numpy; print(numpy.random.random())"],
        template=template(paths, imports=["numpy"], env=env),
        env=env,
    )
    drawn = {(await run(processes, spec, forked=True)).split()[0] for _ in range(3)}
    assert len(drawn) == 3
