"""A tree of commands of which only the one that is called gets loaded.

A plain Typer application imports and inspects every command before it does anything. Here a table names module,
function and first sentence of each, so that `hive --help` loads none and `hive agent list` one
(benchmarks/cli.py measures it).
"""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer._coercion import build_runtime_param
from typer._param_types import coerce_cli_path
from typer.core import TyperCommand, TyperGroup

from hive.cli.call import STATE_DIR, CommandCall
from hive.errors import did_you_mean

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter, Parameter
    from typer._click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """A command: `module:function` in hive.cli, the first sentence of its help, and which common options it has.

    `options`: `client` (--json, --socket, --state-dir), `json`, or nothing.
    """

    target: str
    sentence: str
    options: str = "client"
    hidden: bool = False


class CommandTable(NamedTuple):
    """Commands under one word. `default`: the one that is meant where none is named, empty for the help."""

    sentence: str
    help: str
    entries: Mapping[str, LazyCommand | CommandTable]
    hidden: bool = False
    default: str = ""


class HiveCommand(TyperCommand):
    """A command with a `CommandCall` as context; it takes the common options before the function sees its own."""

    context_class = CommandCall
    common: tuple[str, ...] = ()

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _lightly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        return ["[OPTIONS]", *(argument_word(param) for param in self.get_params(ctx) if is_argument(param))]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        told = list(self.told(ctx))
        for title, wanted in (("Arguments", True), ("Options", False)):
            if rows := [(name, says) for param, name, says in told if is_argument(param) == wanted]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def told(self, ctx: Context) -> Iterator[tuple[Parameter, str, str]]:
        """Each argument and option that help tells of: itself, its name, and the sentence about it.

        Of an argument Typer 0.29 tells the Python type: `[CHECK]... <list[str]>`.
        """
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                yield param, argument_word(param) if is_argument(param) else record[0], record[1]

    def invoke(self, ctx: Context) -> Any:
        gc.freeze()
        gc.enable()  # entry.py has turned it off
        return super().invoke(ctx)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if is_outdone(ctx):
            ctx.params["state_dir"] = None
        for name in self.common:
            setattr(ctx, name, ctx.params.pop(name, None))
        return rest


def is_argument(param: Parameter) -> bool:
    return param.param_type_name == "argument"


def argument_word(param: Parameter) -> str:
    """An argument as man pages write it: `NAME`, `[FILE]`, `NAME...`, `[CHECK]...`.

    Typer 0.29 puts braces or brackets around what has its own: `{FILE...}...`, `[[CHECK]...]...`.
    """
    name = (param.metavar or str(param.name).upper()).removesuffix("...").strip("[]").removesuffix("...")
    many = "" if param.nargs == 1 else "..."
    return f"{name}{many}" if param.required else f"[{name}]{many}"


def is_outdone(ctx: Context) -> bool:
    """Whether HIVE_STATE_DIR means a Hive, and something that says so more closely means another one."""
    if _source(ctx, "state_dir") != "ENVIRONMENT":
        return False
    has_prefix = _source(ctx, "prefix") == "COMMANDLINE"
    talks = "socket" in ctx.params
    return has_prefix or (talks and bool(ctx.params["socket"] or os.environ.get("HIVE_SOCKET")))


def _source(ctx: Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return "" if source is None else source.name


class LazyGroup(TyperGroup):
    """A group made from a table."""

    def __init__(self, group: CommandTable, **attributes: Any) -> None:
        text, epilog = split_examples(group.help)
        super().__init__(help=text, epilog=epilog, no_args_is_help=True, rich_markup_mode=None, **attributes)
        self._group = group

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _lightly(super().get_params(ctx))

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        is_named = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        if self._group.default and not is_named:
            args = [self._group.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002
        return list(self._group.entries)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:  # noqa: ARG002
        if cmd_name not in self.commands:
            found = self._group.entries.get(cmd_name)
            if found is None:
                return None
            self.commands[cmd_name] = (
                LazyGroup(found, name=cmd_name) if isinstance(found, CommandTable) else load(cmd_name, found)
            )
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self._group.entries and not args[0].startswith("-"):
            near = nested(self._group, args[0], ctx.command_path) or did_you_mean(args[0], visible(self._group))
            ctx.fail(f"no such command: {args[0]}" + (f"; {near}" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002
        rows = [(name, entry.sentence) for name, entry in self._group.entries.items() if not entry.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        from typer._click.shell_completion import CompletionItem

        own = [CompletionItem(name) for name in visible(self._group) if name.startswith(incomplete)]
        return own + super(TyperGroup, self).shell_complete(ctx, incomplete)


def visible(group: CommandTable) -> list[str]:
    """The commands that help lists."""
    return [name for name, entry in group.entries.items() if not entry.hidden]


def nested(group: CommandTable, name: str, path: str) -> str:
    """A question about the commands of that name one word deeper, empty where there are none.

    >>> pause = CommandTable("", "", {"agent": CommandTable("", "", {"pause": LazyCommand("", "")})})
    >>> nested(pause, "pause", "hive"), nested(pause, "agent", "hive")
    ('did you mean `hive agent pause`?', '')
    """
    groups = [(word, entry) for word, entry in group.entries.items() if isinstance(entry, CommandTable)]
    found = [f"`{path} {word} {name}`" for word, entry in groups if name in visible(entry)]
    return f"did you mean {' or '.join(found)}?" if found else ""


def load(name: str, entry: LazyCommand) -> HiveCommand:
    """The command of one row: its function is imported now, its docstring is its help and its examples."""
    module, _, attribute = entry.target.partition(":")
    function = getattr(import_module(f"hive.cli.{module}"), attribute)
    text, epilog = split_examples(inspect.getdoc(function) or "")
    command = _built(name, function, help=text, epilog=epilog, hidden=entry.hidden)
    common = {"client": _client_options, "json": _json_option}.get(entry.options)
    if common is not None:
        params = options(common)
        command.params.extend(params)
        command.common = tuple(param.name for param in params if param.name)
    return command


def options(function: Any) -> list[Parameter]:
    """The options a function's signature declares."""
    return _built("options", function).params


def split_examples(text: str) -> tuple[str, str | None]:
    r"""Help and epilog of a docstring: `\b` keeps the examples' lines as they are.

    >>> split_examples("Lists.\n\nExamples:\n  hive agent list")
    ('Lists.', '\x08\nExamples:\n  hive agent list')
    """
    before, found, after = text.partition("\nExamples:\n")
    return (before.strip(), f"\b\nExamples:\n{after.rstrip()}") if found else (text, None)


class _Lightly:
    """Stands before Typer's coercion of one parameter: what needs none gets none.

    Typer 0.29 loads pydantic to turn a str into a str and None into None: 45 of the 120 ms of `hive agent list`.
    What comes from the command line is text, so a value of another type is a default and right already. A path needs
    none either: every service of Hive's is told some, and had pydantic in its memory for them. Neither does a plain
    number, nor one of a few words: the daemon is told `--isolation`, and pydantic was 8 MB of it.
    """

    def coerce(self, value: Any, param: Any, ctx: Context) -> Any:
        descriptor = param.type_descriptor
        annotation, info = descriptor.annotation, descriptor.parameter_info
        if value is None or type(value) is annotation:
            return value
        if annotation == list[str] and all(type(one) is str for one in value):
            return list(value)
        if annotation is Path and isinstance(value, str | Path) and info.parser is None and info.path_type is None:
            return coerce_cli_path(Path(value), info, path_type=Path, param=param, ctx=ctx)
        if inspect.isclass(annotation) and issubclass(annotation, StrEnum) and value in list(annotation):
            return annotation(value)
        number = None if info.parser or info.clamp else plain_number(annotation, value)
        if number is not None and _is_within(number, info.min, info.max):
            return number
        return build_runtime_param(descriptor).coerce(value, param=param, ctx=ctx)


def _is_within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or least <= number) and (most is None or number <= most)


def plain_number(annotation: Any, value: Any) -> float | None:
    """The number that a text writes in plain digits; None where Typer has to look at it.

    >>> plain_number(int, "12"), plain_number(float, "0.5"), plain_number(int, "0.5"), plain_number(str, "1")
    (12, 0.5, None, None)
    """
    digits = {int: r"-?[0-9]{1,15}", float: r"-?[0-9]{1,15}(\.[0-9]{1,15})?"}.get(annotation)
    is_plain = digits is not None and isinstance(value, str) and re.fullmatch(digits, value)
    number: float | None = annotation(value) if is_plain else None
    return number


def _lightly(params: list[Any]) -> list[Any]:
    for param in params:
        param._runtime_param = param._runtime_param or _Lightly()
    return params


def _built(name: str, function: Any, **attributes: Any) -> HiveCommand:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=HiveCommand, **attributes)(function)
    command = typer.main.get_command(app)
    assert isinstance(command, HiveCommand)
    return command


def _json_option(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """The option of commands that only print."""


def _client_options(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", readable=False, help="Socket of the Hive that is meant (or HIVE_SOCKET)."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            readable=False,
            envvar=STATE_DIR,
            show_envvar=False,
            help=f"The Hive that was started with this --state-dir (or {STATE_DIR}).",
        ),
    ] = None,
) -> None:
    """The options of every command that talks to a Hive."""
