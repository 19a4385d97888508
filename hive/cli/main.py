"""The `hive` command: what there is, and how every call of it ends."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from hive.cli.call import err, flush, out, report, wants_json
from hive.cli.entry import SERVICES
from hive.cli.lazy import CommandTable, LazyCommand, LazyGroup, options
from hive.errors import AS_ROOT, HiveError, NotPermitted, UsageError

AGENT = CommandTable(
    "Agents: create, look at, pause, remove.",
    """Agents: create, look at, pause, remove.

Examples:
  hive agent create alice -- /usr/bin/python3 /srv/alice.py
  hive agent list
  hive agent pause alice
""",
    {
        "list": LazyCommand(
            "agents.list:list_agents", "Lists the agents: what they do, what they cost, why they are awake."
        ),
        "show": LazyCommand("agents.show:show", "Shows one agent on one screen."),
        "create": LazyCommand("agents.spec:create", "Creates an agent and starts it."),
        "apply": LazyCommand("agents.spec:apply", "Makes an agent what a file describes."),
        "edit": LazyCommand(
            "agents.edit:edit", "Opens an agent's description in an editor and applies what was saved."
        ),
        "export": LazyCommand("agents.spec:export", "Prints an agent's description as TOML."),
        "start": LazyCommand("agents.steer:start", "Starts stopped agents."),
        "stop": LazyCommand("agents.steer:stop", "Stops agents."),
        "restart": LazyCommand("agents.steer:restart", "Stops agents and starts them again."),
        "pause": LazyCommand("agents.steer:pause", "Puts agents to sleep."),
        "resume": LazyCommand("agents.steer:resume", "Wakes sleeping agents."),
        "send": LazyCommand("agents.mail:send", "Sends a message to an agent."),
        "messages": LazyCommand("agents.mail:messages", "Lists the messages an agent has not accepted."),
        "responses": LazyCommand("agents.responses:responses", "Shows how much is kept of an agent's responses."),
        "wake-at": LazyCommand("agents.time:wake_at", "Wakes an agent at a time, once or again and again."),
        "keep-awake": LazyCommand("agents.time:keep_awake", "Keeps an agent from being put to sleep."),
        "exec": LazyCommand("agents.exec:exec_", "Runs a program inside an agent."),
        "logs": LazyCommand("agents.show:logs", "Prints what an agent wrote to its output."),
        "usage": LazyCommand("agents.show:usage", "Shows what one agent used."),
        "remove": LazyCommand("agents.steer:remove", "Removes agents."),
        "ls": LazyCommand("agents.list:list_agents", "Lists the agents.", hidden=True),
        "ps": LazyCommand("agents.list:list_agents", "Lists the agents.", hidden=True),
        "rm": LazyCommand("agents.steer:remove", "Removes agents.", hidden=True),
    },
)
BENCH = CommandTable(
    "Measures Hive on its own host.",
    """Measures Hive on its own host.

Examples:
  hive bench sleep
  hive bench density --quick
""",
    {
        "sleep": LazyCommand("bench:sleep", "Measures what sleep gains here."),
        "density": LazyCommand(
            "bench:measure_density", "Measures how many real agents a box of fixed memory holds.", "json"
        ),
    },
)
BACKEND = CommandTable(
    "The inference server behind Hive.",
    """The inference server behind Hive.

Examples:
  hive backend status
  hive backend switch vllm
""",
    {
        "status": LazyCommand("status:backend_status", "Shows the inference server Hive stands in front of."),
        "list": LazyCommand("backend:list_backends", "Lists the inference servers that can be switched to."),
        "switch": LazyCommand("backend:switch", "Switches to another inference server."),
        "logs": LazyCommand("backend:logs", "Prints what an inference server that Hive started wrote last."),
    },
)
MODEL = CommandTable(
    "Models: list, show, bring, remove, load, unload, and which one a request is given.",
    """Models: list, show, bring, remove, load, unload, and which one a request is given.

Examples:
  hive model list
  hive model pull llama3.2
  hive model route llama3.2 --tier low
""",
    {
        "list": LazyCommand("model:list_models", "Lists the models behind Hive."),
        "show": LazyCommand("model:show", "Shows all that is known of one model."),
        "refresh": LazyCommand("model:refresh", "Asks the inference server what models it offers now, and lists them."),
        "pull": LazyCommand(
            "model:pull", "Brings a model: by its name where Ollama is in use, else from files of this box."
        ),
        "remove": LazyCommand(
            "model:remove", "Removes a model: Ollama's own, or its files where `hive model pull` puts them."
        ),
        "load": LazyCommand("model_orders:load", "Loads a model, as a request for it would."),
        "unload": LazyCommand("model_orders:unload", "Unloads a model."),
        "pin": LazyCommand("model_orders:pin", "Keeps a model of the pool loaded, from now on and after a restart."),
        "unpin": LazyCommand("model_orders:unpin", "Ends a pin."),
        "deployed": LazyCommand(
            "model_orders:deployed", "Lists the models that were ordered to be loaded, and by whom."
        ),
        "logs": LazyCommand("model_orders:logs", "Prints what the server of one model of the pool wrote last."),
        "route": LazyCommand("model:route", "Explains which model a request is given, step by step."),
        "prompts": LazyCommand(
            "prompts:prompts",
            "Lists the system prompts of living agents: who shares one, and whether the backend has read it already.",
        ),
    },
)
ADAPTER = CommandTable(
    "Adapters: LoRA weights that answer beside a model, under a name of their own.",
    """Adapters: LoRA weights that answer beside a model, under a name of their own. Without a command: list.

Examples:
  hive adapter pull legal-v2 --base qwen3-8b --name legal
  hive adapter load legal
  hive adapter list
""",
    {
        "list": LazyCommand(
            "adapters.orders:list_adapters",
            "Lists the adapters: on which model, which build of each is loaded, and whose key signed it.",
        ),
        "show": LazyCommand(
            "adapters.orders:show",
            "Shows all that is known of one adapter: its builds, their files, and what is loaded.",
        ),
        "pull": LazyCommand(
            "adapters.orders:pull",
            "Brings an adapter from the directory that [adapters] dir names: copied, checked as a copy, installed"
            " whole.",
        ),
        "load": LazyCommand("adapters.orders:load", "Loads an adapter, the build that was installed last."),
        "unload": LazyCommand("adapters.orders:unload", "Unloads an adapter."),
        "remove": LazyCommand(
            "adapters.orders:remove", "Removes an adapter that is installed: all of its builds, or one."
        ),
        "keys": LazyCommand(
            "adapters.orders:keys",
            "Lists the keys that adapters are signed with: which are trusted, which are revoked, and what each has"
            " signed.",
        ),
        "sign": LazyCommand(
            "adapters.signing:sign",
            "Signs an adapter with a key: all files of the directory, but what Git keeps.",
            "json",
        ),
        "verify": LazyCommand(
            "adapters.signing:verify",
            "Verifies that an adapter is what a trusted key has signed, as an installation would.",
            "json",
        ),
        "trust": LazyCommand(
            "adapters.trust:trust",
            "Trusts a public key: adapters that are signed with it may be installed from now on.",
            "json",
        ),
        "revoke": LazyCommand(
            "adapters.trust:revoke",
            "Revokes a key: nothing it has signed is installed or loaded from now on, and what is loaded of it is "
            "unloaded.",
            "json",
        ),
    },
    default="list",
)
JOB = CommandTable(
    "Jobs: models that work through tools, and what else takes long.",
    """Jobs: models that work through tools, and what else takes long. Without a command: list.

Examples:
  hive job run tidy --model qwen3-8b --follow "Which of these notes is out of date?" < notes.txt
  hive job
""",
    {
        "list": LazyCommand(
            "jobs.orders:list_jobs",
            "Lists the last jobs, the newest first: models at work, and what else takes long, such as loads.",
        ),
        "run": LazyCommand("jobs.run:run", "Has a model work through tools, as a job of the daemon."),
        "show": LazyCommand(
            "jobs.orders:show", "Shows one job; of a model at work that has ended, its turns, signals and tokens, too."
        ),
        "logs": LazyCommand(
            "jobs.orders:logs", "Prints what a model at work says, calls and signals, from the beginning."
        ),
        "result": LazyCommand("jobs.orders:result", "Prints the answer of a model at work, once it has ended."),
        "cancel": LazyCommand("jobs.orders:cancel", "Ends a job."),
        "release": LazyCommand(
            "jobs.orders:release", "Deletes the output and the result of a model at work that has ended."
        ),
    },
    default="list",
)
POOL = CommandTable(
    "The models that share this box's memory: which is loaded, and why.",
    """The models that share this box's memory: which is loaded, and why. Without a command: show.

Examples:
  hive pool
  hive pool explain qwen3-32b
""",
    {
        "show": LazyCommand(
            "pool:show",
            "Shows whose memory the models are in, what is free, and each model with the reason for its state.",
        ),
        "explain": LazyCommand(
            "pool:explain",
            "Explains why a model is where it is, what would leave for it, and how long a request for it would wait.",
        ),
        "import": LazyCommand(
            "pool_import:import_models",
            "Makes descriptions for models.d of the models of a manifest, and of the tasks of tasks.yaml.",
            "json",
        ),
    },
    default="show",
)
CACHE = CommandTable(
    "What inference servers keep of prompts: how much is reused, and flushing it.",
    """What inference servers keep of prompts: how much is reused, and flushing it. Without a command: show.

Examples:
  hive cache
  hive cache flush --tenant acme
""",
    {
        "show": LazyCommand(
            "cache:show", "Shows what was reused of prompts, model by model, and what was flushed last."
        ),
        "flush": LazyCommand(
            "cache:flush", "Ends the reuse of earlier prompts. No request is ended, and none is kept waiting."
        ),
    },
    default="show",
)
TASK = CommandTable(
    "Tasks: ladders of models that requests ask for by one name.",
    """Tasks: ladders of models that requests ask for by one name. Without a command: list.

Examples:
  hive task
  hive task route plan --as alice
""",
    {
        "list": LazyCommand("task:list_tasks", "Lists the tasks, and the model that would answer each now."),
        "show": LazyCommand("task:show", "Shows one task: its ladder, its rules, and how each of its models is."),
        "route": LazyCommand("task:route", "Explains which model a request for a task would be given now, and why."),
    },
    default="list",
)
LEASE = CommandTable(
    "Leases: memory of the pool for programs that are no model.",
    """Leases: memory of the pool for programs that are no model. Without a command: list.

Examples:
  hive lease run --vram 8G -- python train.py
  hive lease
""",
    {
        "list": LazyCommand(
            "leases.orders:list_leases", "Lists the leases: who waits in line, who holds memory, and why."
        ),
        "show": LazyCommand("leases.orders:show", "Shows one lease, an ended one too."),
        "run": LazyCommand("leases.run:run", "Waits for memory of the pool, then becomes a program that uses it."),
        "take": LazyCommand("leases.orders:take", "Takes a lease for what is no program of this box."),
        "renew": LazyCommand("leases.orders:renew", "Renews a lease that was taken."),
        "release": LazyCommand("leases.orders:release", "Gives a lease back that was taken, or leaves the line."),
        "end": LazyCommand("leases.orders:end", "Ends a lease, whoever holds it."),
    },
    default="list",
)
TEMPLATE = CommandTable(
    "Templates: processes with their packages imported, which agents are forked from.",
    """Templates: processes with their packages imported, which agents are forked from. Without a command: list.

Examples:
  hive template
  hive template check langgraph
  hive agent create alice --template langgraph -- agent.py
""",
    {
        "list": LazyCommand(
            "templates.orders:list_templates",
            "Lists the templates: how each is, how many agents were forked from it, and what that saves.",
        ),
        "show": LazyCommand(
            "templates.orders:show",
            "Shows one template: what hive.conf says of it, its process, its agents, and what they share.",
        ),
        "restart": LazyCommand(
            "templates.orders:restart",
            "Starts a template anew, as after its packages were updated, or where it has failed.",
        ),
        "check": LazyCommand(
            "templates.check:check",
            "Checks templates by starting each: its imports are done, it is warmed, and then it ends.",
            "json",
        ),
    },
    default="list",
)
QUEUE = CommandTable(
    "Requests under way: who waits for the model, who runs.",
    """Requests under way: who waits for the model, who runs. Without a command: list.

Examples:
  hive queue
  hive queue cancel 69214ae1c0ffee-42
""",
    {
        "list": LazyCommand("queue:list_requests", "Lists the requests to the model that are under way."),
        "show": LazyCommand("queue:show", "Shows one request, under way or ended."),
        "cancel": LazyCommand("queue:cancel", "Ends a request that is under way."),
    },
    default="list",
)
AUDIT = CommandTable(
    "The audit log: acts on agents and settings, and a check that it is whole.",
    """The audit log: acts on agents and settings, and a check that it is whole.

Examples:
  hive audit list --since 1d
  sudo hive audit verify
""",
    {
        "list": LazyCommand("audit:list_rows", "Lists who did what, to whom, and how it ended."),
        "verify": LazyCommand(
            "audit:verify", "Checks that no row of the audit table was changed, removed or moved.", "json"
        ),
    },
)
TOKEN = CommandTable(
    "Tokens of the REST API on TCP: create, list, revoke.",
    """Tokens of the REST API on TCP: create, list, revoke.

Examples:
  hive token create grafana --role viewer
  hive token list
""",
    {
        "create": LazyCommand("token:create", "Makes a token and prints it."),
        "list": LazyCommand(
            "token:list_tokens", "Lists the tokens: who made them, what they may, when they were used last."
        ),
        "revoke": LazyCommand("token:revoke", "Makes a token good for nothing, at once: what is open to it ends."),
    },
)
OP = CommandTable(
    "Operations that need more than one person's word: request, sign, submit.",
    """Operations that need more than one person's word: request, sign, submit.

Examples:
  hive op request model-load modelId=qwen3-32b
  hive op sign model-load.op --key ann.key
  hive op submit model-load.op
""",
    {
        "keygen": LazyCommand(
            "op:keygen",
            "Makes a signer's key: the secret half goes into a file of its own, the public half is printed.",
            "json",
        ),
        "request": LazyCommand("op:request", "Writes down an operation for its signers to sign."),
        "sign": LazyCommand(
            "op:sign", "Signs an operation with a signer's key, after it has shown what that is.", "json"
        ),
        "show": LazyCommand(
            "op:show", "Shows an operation: what is asked for, of which box, until when, and how many signed it."
        ),
        "verify": LazyCommand(
            "op:verify", "Verifies an operation as its box would, but for whether it was used.", "json"
        ),
        "submit": LazyCommand(
            "op:submit", "Sends an operation to the Hive it is for, with its signatures, and waits until it is done."
        ),
    },
)
DB = CommandTable(
    "Hive's own database, read with SQL.",
    """Hive's own database, read with SQL. Nothing of it can be changed here.

Examples:
  hive db tables
  hive db query "SELECT name, status FROM agents"
""",
    {
        "tables": LazyCommand("db:tables", "Lists the tables of Hive's database: rows, size and columns."),
        "schema": LazyCommand("db:schema", "Prints the statements that make the tables and their indexes."),
        "query": LazyCommand("db:query", "Reads Hive's database with one SQL statement."),
    },
)
CONFIG = CommandTable(
    "Settings: show, check, change.",
    """Settings: show, check, change.

Examples:
  hive config show --origin
  hive config check ./hive.conf
""",
    {
        "show": LazyCommand(
            "config:show", "Shows every setting as the file, this environment and the defaults have it.", "json"
        ),
        "check": LazyCommand("config:check", "Checks a file without starting anything.", "json"),
        "path": LazyCommand("config:path", "Prints which file is read.", "json"),
        "set": LazyCommand("config:set_", "Changes a setting in the file.", "json"),
        "unset": LazyCommand("config:unset", "Takes a setting out of the file.", "json"),
        "runtime": LazyCommand(
            "config_runtime:runtime", "Shows the settings in force in the running Hive, or changes some of them there."
        ),
    },
)
SECRETS = CommandTable(
    "Secrets of the installed Hive: list, rotate.",
    """Secrets of the installed Hive: list, rotate.

Examples:
  hive secrets list
""",
    {
        "list": LazyCommand("secrets:list_secrets", "Lists the secrets: how old each is and what reads it.", "json"),
        "rotate": LazyCommand(
            "secrets:rotate", "Puts a new secret in place of an old one and restarts what reads it.", "json"
        ),
        "generate": LazyCommand(
            "secrets:generate", "Makes the secrets that are missing; those that are there stay.", "json"
        ),
    },
)
HIVE = CommandTable(
    "",
    """Many sandboxed agents on one box: asleep while idle, awake in milliseconds, one metered way to the model.

Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 not permitted, 5 dependency down, 6 rolled back, 7 timeout,
130 interrupted. `hive COMMAND --help` has examples of each command, `hive explain CODE` the cure of an error.

Examples:
  hive up --demo
  hive status
  hive ps
  hive agent create alice -- /usr/bin/python3 /srv/alice.py
""",
    {
        "up": LazyCommand("services:up", "Starts a whole Hive in the foreground.", ""),
        "demo": LazyCommand(
            "demo:demo", "Shows what Hive does: a guided tour of a minute, on a Hive of its own.", "json"
        ),
        "status": LazyCommand("status:status", "Shows whether Hive is well, and which Hive that is."),
        "top": LazyCommand("top:top", "Shows every agent, the backend and the queue on one screen."),
        "doctor": LazyCommand(
            "doctor:doctor", "Checks this host and the Hive on it: what is wrong, why, what changes it."
        ),
        "explain": LazyCommand(
            "explain:explain", "Explains the code of an error: its meaning, its usual causes, and what to do.", "json"
        ),
        "run": LazyCommand("chat:run", "Asks a model, through Hive."),
        "agent": AGENT,
        "ps": LazyCommand("agents.list:list_agents", "Lists the agents."),
        "usage": LazyCommand("usage:usage", "Shows what was used, by agent, tenant, model, backend or hour."),
        "events": LazyCommand("status:events", "Prints what happened to the agents, and why."),
        "logs": LazyCommand("logs:logs", "Prints what the services of Hive say."),
        "queue": QUEUE,
        "backend": BACKEND,
        "model": MODEL,
        "adapter": ADAPTER,
        "job": JOB,
        "pool": POOL,
        "cache": CACHE,
        "capabilities": LazyCommand(
            "capabilities:capabilities", "Shows what the runner API says of this Hive: models, memory, queue."
        ),
        "task": TASK,
        "template": TEMPLATE,
        "lease": LEASE,
        "bench": BENCH,
        "audit": AUDIT,
        "token": TOKEN,
        "op": OP,
        "db": DB,
        "config": CONFIG,
        "secrets": SECRETS,
        "install": LazyCommand("install:install", "Installs this version of Hive as services.", "json"),
        "uninstall": LazyCommand("install:uninstall", "Removes the installed Hive.", "json"),
        "backup": LazyCommand("backup:backup", "Writes what a Hive knows into one file.", "json"),
        "restore": LazyCommand("backup:restore", "Puts a backup in place of what is there.", "json"),
        "version": LazyCommand("version:version", "Prints the version of this command.", "json"),
        "proxy": LazyCommand("services:proxy", "Runs the data plane, a service.", ""),
        "daemon": LazyCommand("services:daemon", "Runs the control plane, a service.", ""),
        "sandbox": LazyCommand("services:sandbox", "Runs the helper, a service.", ""),
        "sandbox-thaw": LazyCommand(
            "services:sandbox_thaw",
            "Thaws every agent, where a helper was killed: what is frozen cannot be stopped.",
            "",
            hidden=True,
        ),
        "demo-backend": LazyCommand(
            "services:demo_backend", "Runs an inference server with canned text.", "", hidden=True
        ),
        "run-backend": LazyCommand(
            "run_backend:run_backend", "Becomes the inference server that hive.conf describes.", "", hidden=True
        ),
        "run-model": LazyCommand("run_model:run_model", "Runs the server of one model of the pool.", "", hidden=True),
        "jobs": LazyCommand("run_jobs:run_jobs", "Runs the loops of model jobs, a service.", "", hidden=True),
    },
)
"""Every command: a test holds each sentence against the docstring it stands for."""


def root() -> LazyGroup:
    """The whole tree, nothing of it loaded yet."""
    return LazyGroup(
        HIVE, name="hive", params=[*options(_root_options), *typer.main.get_install_completion_arguments()]
    )


def _print_version(asked: bool) -> None:
    if asked:
        from hive.cli.version import line

        out(line())
        raise typer.Exit


def _root_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options that may stand before the command."""


def main(arguments: Sequence[str]) -> int:
    """Does what `arguments` say and returns the exit code. No expected failure ends in a traceback.

    HIVE_DEBUG=1 in the environment shows one for every failure.
    """
    try:
        code = root().main(args=arguments, prog_name="hive", standalone_mode=False)
        flush()
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        return failed(error, arguments)


def failed(error: Exception | KeyboardInterrupt, arguments: Sequence[str]) -> int:
    """Says what went wrong; the exit code."""
    as_json = wants_json(arguments)
    match error:
        case typer.TyperException():
            return _misused(error, as_json=as_json)
        case HiveError():
            if os.environ.get("HIVE_DEBUG"):
                traceback.print_exception(error)
            return report(_typed(error, arguments), as_json=as_json)
        case KeyboardInterrupt():
            return 130
        case BrokenPipeError():
            _forget_stdout()
            return 1
        case PermissionError():
            return report(_typed(_forbidden(error), arguments), as_json=as_json)
    if os.environ.get("HIVE_DEBUG") or (arguments and arguments[0] in SERVICES):
        traceback.print_exception(error)
    fault = HiveError(
        f"a fault in Hive itself: {type(error).__name__}: {error}", hint="HIVE_DEBUG=1 shows where it happened"
    )
    return report(fault, as_json=as_json)


def _forbidden(error: PermissionError) -> NotPermitted:
    """A file of another user's, which a command came upon: no fault of Hive."""
    if os.environ.get("HIVE_DEBUG"):
        traceback.print_exception(error)
    return NotPermitted(f"{error.filename or 'this'}: {error.strerror or 'permission denied'}", hint=AS_ROOT)


def _typed(error: HiveError, arguments: Sequence[str]) -> HiveError:
    """The error, with the command in its hint where only root may do this."""
    if error.hint == AS_ROOT:
        error.hint = f"as root: sudo {shlex.join(['hive', *arguments])}" if os.geteuid() != 0 else ""
    return error


def _misused(error: typer.TyperException, *, as_json: bool) -> int:
    """The command line itself is wrong: Typer's message in Hive's form."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        err(error.format_message())
        return error.exit_code
    path = context.command_path if context is not None else "hive"
    return report(UsageError(error.format_message(), hint=f"{path} --help"), as_json=as_json)


def _forget_stdout() -> None:
    """Forgets stdout after its reader is gone: no more is written, and the interpreter does not complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
