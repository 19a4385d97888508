"""The forms of a command that a template can run: a Python script, a module, or code. Pure.

What a template runs it runs in its own interpreter, so flags of an interpreter, another interpreter, and any other
program are ordinary programs.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN = ("python", "python3")
"""Names for the template's own interpreter in the command of an agent."""
SCRIPT = ".py"
"""The end of a script's name; what a file is by its content only its reader knows."""


def script_of(command: Sequence[str], python: str) -> list[str] | None:
    """The arguments of the interpreter, from the script on; None for an ordinary program.

    >>> script_of(["/srv/agent.py", "-v"], "/venv/bin/python")
    ['/srv/agent.py', '-v']
    >>> script_of(["python3", "-m", "agent"], "/venv/bin/python")
    ['-m', 'agent']
    >>> script_of(["/venv/bin/python", "/srv/agent"], "/venv/bin/python")
    ['/srv/agent']
    >>> [script_of(words, "/venv/bin/python") for words in (["python", "-O", "a.py"], ["/usr/bin/python3", "/a.py"])]
    [None, None]
    >>> script_of(["/usr/bin/node", "x.js"], "/venv/bin/python"), script_of(["-m"], "/venv/bin/python")
    (None, None)
    """
    is_interpreters = bool(command) and command[0] in (*PLAIN, python)
    words = list(command[1:] if is_interpreters else command)
    if not words or not words[0]:
        return None
    if words[0] in ("-m", "-c"):
        return words if len(words) > 1 else None
    if words[0].startswith("-"):
        return None
    return words if is_interpreters or words[0].endswith(SCRIPT) else None


def exec_of(command: Sequence[str], python: str) -> list[str]:
    """The command line of the same agent as an ordinary program.

    >>> exec_of(["/srv/agent.py"], "/venv/bin/python"), exec_of(["python", "-O", "/a.py"], "/venv/bin/python")
    (['/venv/bin/python', '/srv/agent.py'], ['/venv/bin/python', '-O', '/a.py'])
    >>> exec_of(["/usr/bin/node", "x.js"], "/venv/bin/python"), exec_of(["-X", "dev", "/a.py"], "/venv/bin/python")
    (['/usr/bin/node', 'x.js'], ['/venv/bin/python', '-X', 'dev', '/a.py'])
    """
    if command and command[0] in PLAIN:
        return [python, *command[1:]]
    is_for_python = bool(command) and (command[0].startswith("-") or command[0].endswith(SCRIPT))
    return [python, *command] if is_for_python else list(command)
