"""The `hive` command: what there is, and how every call of it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from hive.cli.call import err, flush, out, report, wants_json
from hive.cli.lazy import Entry, Group, LazyGroup, options
from hive.errors import HiveError, NotPermitted, UsageError

AGENT = Group(
    "Agents: create, look at, pause, remove.",
    """Agents: create, look at, pause, remove.

Examples:
  hive agent create alice -- /usr/bin/python3 /srv/alice.py
  hive agent list
  hive agent pause alice
""",
    {
        "list": Entry("agent_list:list_agents", "Lists the agents: what they do, what they cost, why they are awake."),
        "show": Entry("agent:show", "Shows one agent on one screen."),
        "create": Entry("agent_spec:create", "Creates an agent and starts it."),
        "apply": Entry("agent_spec:apply", "Makes an agent what a file describes."),
        "edit": Entry("agent_edit:edit", "Opens an agent's description in an editor and applies what was saved."),
        "export": Entry("agent_spec:export", "Prints an agent's description as TOML."),
        "start": Entry("agent_steer:start", "Starts stopped agents."),
        "stop": Entry("agent_steer:stop", "Stops agents."),
        "restart": Entry("agent_steer:restart", "Stops agents and starts them again."),
        "pause": Entry("agent_steer:pause", "Puts agents to sleep."),
        "resume": Entry("agent_steer:resume", "Wakes sleeping agents."),
        "send": Entry("agent_mail:send", "Sends a message to an agent."),
        "messages": Entry("agent_mail:messages", "Lists the messages an agent has not accepted."),
        "responses": Entry("agent_responses:responses", "Shows how much is kept of an agent's responses."),
        "wake-at": Entry("agent_time:wake_at", "Wakes an agent at a time, once or again and again."),
        "keep-awake": Entry("agent_time:keep_awake", "Keeps an agent from being put to sleep."),
        "exec": Entry("agent_exec:exec_", "Runs a program inside an agent."),
        "logs": Entry("agent:logs", "Prints what an agent wrote to its output."),
        "usage": Entry("agent:usage", "Shows what one agent used."),
        "remove": Entry("agent_steer:remove", "Removes agents."),
        "ls": Entry("agent_list:list_agents", "Lists the agents.", hidden=True),
        "ps": Entry("agent_list:list_agents", "Lists the agents.", hidden=True),
        "rm": Entry("agent_steer:remove", "Removes agents.", hidden=True),
    },
)
BENCH = Group(
    "Measures this Hive on its own host.",
    """Measures this Hive on its own host.

Examples:
  hive bench sleep
""",
    {"sleep": Entry("bench:sleep", "Measures what sleep gains here.")},
)
BACKEND = Group(
    "The inference server behind Hive.",
    """The inference server behind Hive.

Examples:
  hive backend status
  hive backend switch vllm
""",
    {
        "status": Entry("status:backend_status", "Shows the inference server Hive stands in front of."),
        "list": Entry("backend:list_backends", "Lists the inference servers that can be switched to."),
        "switch": Entry("backend:switch", "Switches to another inference server."),
        "logs": Entry("backend:logs", "Prints what an inference server that Hive started wrote last."),
    },
)
MODEL = Group(
    "Models: list, show, bring, remove, and which one a request is given.",
    """Models: list, show, bring, remove, and which one a request is given.

Examples:
  hive model list
  hive model pull llama3.2
  hive model route llama3.2 --tier low
""",
    {
        "list": Entry("model:list_models", "Lists the models behind Hive."),
        "show": Entry("model:show", "Shows all that is known of one model."),
        "refresh": Entry("model:refresh", "Asks the inference server what models it offers now, and lists them."),
        "pull": Entry("model:pull", "Brings a model: by its name where Ollama is in use, else from files of this box."),
        "remove": Entry(
            "model:remove", "Removes a model: Ollama's own, or its files where `hive model pull` puts them."
        ),
        "route": Entry("model:route", "Explains which model a request is given, step by step."),
        "prompts": Entry(
            "prompts:prompts",
            "Lists the system prompts of living agents: who shares one, and whether the backend has read it already.",
        ),
    },
)
QUEUE = Group(
    "Requests under way: who waits for the model, who runs.",
    """Requests under way: who waits for the model, who runs. Without a command: list.

Examples:
  hive queue
  hive queue cancel 69214ae1c0ffee-42
""",
    {
        "list": Entry("queue:list_requests", "Lists the requests to the model that are under way."),
        "show": Entry("queue:show", "Shows one request, under way or ended."),
        "cancel": Entry("queue:cancel", "Ends a request that is under way."),
    },
    default="list",
)
AUDIT = Group(
    "Who did what, and whether that record is whole.",
    """Who did what, and whether that record is whole.

Examples:
  hive audit list --since 1d
  sudo hive audit verify
""",
    {
        "list": Entry("audit:list_rows", "Lists who did what, to whom, and how it ended."),
        "verify": Entry("audit:verify", "Checks that no row of the audit table was changed, removed or moved.", "json"),
    },
)
TOKEN = Group(
    "Tokens of the REST API on TCP: create, list, revoke.",
    """Tokens of the REST API on TCP: create, list, revoke.

Examples:
  hive token create grafana --role viewer
  hive token list
""",
    {
        "create": Entry("token:create", "Makes a token and prints it."),
        "list": Entry("token:list_tokens", "Lists the tokens: who made them, what they may, when they were used last."),
        "revoke": Entry("token:revoke", "Makes a token good for nothing, at once: what is open to it ends."),
    },
)
CONFIG = Group(
    "Settings: show, check, change.",
    """Settings: show, check, change.

Examples:
  hive config show --origin
  hive config check ./hive.conf
""",
    {
        "show": Entry("config:show", "Shows every setting as it is in force here.", "json"),
        "check": Entry("config:check", "Checks a file without starting anything.", "json"),
        "path": Entry("config:path", "Prints which file is read.", "json"),
        "set": Entry("config:set_", "Changes a setting in the file.", "json"),
        "unset": Entry("config:unset", "Takes a setting out of the file.", "json"),
        "runtime": Entry(
            "config_runtime:runtime", "Shows the settings in force in the running Hive, or changes some of them there."
        ),
    },
)
SECRETS = Group(
    "Secrets of the installed Hive: list, rotate.",
    """Secrets of the installed Hive: list, rotate.

Examples:
  hive secrets list
""",
    {
        "list": Entry("secrets:list_secrets", "Lists the secrets: how old each is and what reads it.", "json"),
        "rotate": Entry(
            "secrets:rotate", "Puts a new secret in place of an old one and restarts what reads it.", "json"
        ),
        "generate": Entry("secrets:generate", "Makes the secrets that are missing; those that are there stay.", "json"),
    },
)
HIVE = Group(
    "",
    """Many sandboxed agents on one box: asleep while idle, awake in milliseconds, one metered way to the model.

Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 not permitted, 5 dependency down, 6 rolled back, 7 timeout,
130 interrupted.

Examples:
  hive up --demo
  hive status
  hive agent list
""",
    {
        "up": Entry("services:up", "Starts a whole Hive in the foreground.", ""),
        "status": Entry("status:status", "Shows whether Hive is well, and which Hive that is."),
        "top": Entry("top:top", "Shows every agent, the backend and the queue on one screen."),
        "doctor": Entry("doctor:doctor", "Checks this host and the Hive on it: what is wrong, why, what changes it."),
        "run": Entry("chat:run", "Asks a model, through Hive."),
        "agent": AGENT,
        "ps": Entry("agent_list:list_agents", "Lists the agents."),
        "usage": Entry("usage:usage", "Shows what was used, by agent, tenant, model, backend or hour."),
        "events": Entry("status:events", "Prints what happened to the agents, and why."),
        "logs": Entry("logs:logs", "Prints what the services of Hive say."),
        "queue": QUEUE,
        "backend": BACKEND,
        "model": MODEL,
        "bench": BENCH,
        "audit": AUDIT,
        "token": TOKEN,
        "config": CONFIG,
        "secrets": SECRETS,
        "install": Entry("install:install", "Installs this version of Hive as services.", "json"),
        "uninstall": Entry("install:uninstall", "Removes the installed Hive.", "json"),
        "backup": Entry("backup:backup", "Writes what a Hive knows into one file.", "json"),
        "restore": Entry("backup:restore", "Puts a backup in place of what is there.", "json"),
        "version": Entry("version:version", "Prints the version of this command.", "json"),
        "proxy": Entry("services:proxy", "Runs the data plane, a service.", ""),
        "daemon": Entry("services:daemon", "Runs the control plane, a service.", ""),
        "sandbox": Entry("services:sandbox", "Runs the helper, a service.", ""),
        "sandbox-thaw": Entry(
            "services:sandbox_thaw",
            "Thaws every agent, where a helper was killed: what is frozen cannot be stopped.",
            "",
            hidden=True,
        ),
        "demo-backend": Entry("services:demo_backend", "Runs an inference server with canned text.", "", hidden=True),
        "run-backend": Entry(
            "run_backend:run_backend", "Becomes the inference server that hive.conf describes.", "", hidden=True
        ),
    },
)
"""Every command: a test holds each sentence against the docstring it stands for."""
SERVICES = ("up", "proxy", "daemon", "sandbox", "sandbox-thaw", "demo-backend", "run-backend")
"""Nobody can repeat what went wrong in these, so a fault of Hive's own says where it was."""


def root() -> LazyGroup:
    """The whole tree, nothing of it loaded yet."""
    return LazyGroup(
        HIVE, name="hive", params=[*options(_root_options), *typer.main.get_install_completion_arguments()]
    )


def _print_version(asked: bool) -> None:
    if asked:
        from hive.build import version

        out(f"hive {version()}")
        raise typer.Exit


def _root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What may stand before the command."""


def run() -> None:
    """The `hive` program."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Does what `arguments` say and returns the exit code. No expected failure ends in a traceback.

    HIVE_DEBUG=1 in the environment shows one for every failure.
    """
    as_json = wants_json(arguments)
    try:
        code = root().main(args=arguments, prog_name="hive", standalone_mode=False)
        flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _misused(error, as_json=as_json)
    except HiveError as error:
        if os.environ.get("HIVE_DEBUG"):
            traceback.print_exc()
        return report(error, as_json=as_json)
    except typer.Abort:
        return report(HiveError("nothing was done"), as_json=as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except PermissionError as error:
        return report(_forbidden(error), as_json=as_json)
    except Exception as error:
        if os.environ.get("HIVE_DEBUG") or (arguments and arguments[0] in SERVICES):
            traceback.print_exc()
        fault = HiveError(
            f"a fault in Hive itself: {type(error).__name__}: {error}", hint="HIVE_DEBUG=1 shows where it happened"
        )
        return report(fault, as_json=as_json)


def _forbidden(error: PermissionError) -> NotPermitted:
    """A file of another user's, which a command came upon: no fault of Hive."""
    if os.environ.get("HIVE_DEBUG"):
        traceback.print_exc()
    hint = "" if os.geteuid() == 0 else "as root: sudo hive …"
    return NotPermitted(f"{error.filename or 'this'}: {error.strerror or 'permission denied'}", hint=hint)


def _misused(error: typer.TyperException, *, as_json: bool) -> int:
    """The command line itself is wrong: Typer's message in Hive's form."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        err(error.format_message())
        return error.exit_code
    path = context.command_path if context is not None else "hive"
    return report(UsageError(error.format_message(), hint=f"{path} --help"), as_json=as_json)


def _forget_stdout() -> None:
    """Whoever read our output is gone: nothing more is written, and the interpreter does not complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
