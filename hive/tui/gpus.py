"""The pane of GPUs: memory by its holders, load now and before, as detailed as there is room. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hive.terminal_text import shares
from hive.tui.cells import fit, one_line, size
from hive.tui.charts import spark
from hive.tui.lines import Line, LinePart, Role, cut, joined, line, text_of
from hive.tui.snapshot import BackendRow, GpuInstanceLine, GpuProcessLine, GpuRow

NOT_KNOWN = "n/a"
INDENT = " " * 6
GRID = 26
"""Columns a GPU has where several share a line."""
PROGRAMS = {"vllm": ("vllm",), "llama": ("llama-server",), "ollama": ("ollama",)}
"""Kind of a backend → how the names of its processes begin; vLLM's call themselves `VLLM::EngineCore`."""
BLOCKS, ASCII = "█▓▒░", "#+-."
"""Signs for memory of the backend, of other programs, of holders the driver does not name, and for free memory."""
ROLES: tuple[Role, ...] = ("good", "warn", "dim", "rule")

Busy = Callable[[GpuRow], Sequence[float | None]]
"""The last looks at a GPU: percent, None where it did not say."""


class Drawing(NamedTuple):
    """The form of a drawing: its width, the backend, the curves."""

    width: int
    backend: BackendRow | None
    busy: Busy | None
    unicode: bool

    def bar(self, gpu: GpuRow | GpuInstanceLine, width: int) -> Line:
        """The bar of its memory by holder; empty where that is not known."""
        held = _held(gpu, self.backend)
        cells = shares(held, gpu.total_bytes or 0, width)
        signs = BLOCKS if self.unicode else ASCII
        drawn = zip((*cells, width - sum(cells)), signs, ROLES, strict=True)
        return tuple(LinePart(sign * count, role) for count, sign, role in drawn if count)

    def memory(self, gpu: GpuRow | GpuInstanceLine) -> str:
        """
        >>> drawing = Drawing(80, backend=None, busy=None, unicode=True)
        >>> drawing.memory(GpuInstanceLine(0, "", 20 << 30, None, None, None))
        'n/a/20G'
        """
        if gpu.total_bytes is None and gpu.used_bytes is None:
            return NOT_KNOWN
        return "/".join(NOT_KNOWN if some is None else size(some) for some in (gpu.used_bytes, gpu.total_bytes))


def gpu_lines(gpus: Sequence[GpuRow], room: int, drawing: Drawing) -> list[Line]:
    """All GPUs in at most `room` lines: with what holds their memory, or only themselves, or several on a line."""
    for form in (_in_full, _with_one_line_more, _each):
        lines = [found for gpu in gpus for found in form(gpu, drawing)]
        if len(lines) <= room:
            break
    else:
        lines = _grid(gpus, room, drawing)
    return [cut(found, drawing.width, unicode=drawing.unicode) for found in lines]


def is_of(process: GpuProcessLine, backend: BackendRow | None) -> bool:
    """Whether this is the inference server in use, by the name it shows.

    >>> vllm = BackendRow(kind="vllm", label="", address="", version="", up=True, slots=None, warning="", models=["m"],
    ...     switching="")
    >>> is_of(GpuProcessLine(7, None, "VLLM::EngineCor"), vllm), is_of(GpuProcessLine(7, None, "python3"), vllm)
    (True, False)
    """
    starts = PROGRAMS.get("" if backend is None else backend.kind, ())
    return process.program.casefold().startswith(starts) if starts else False


def name_of(gpu: GpuRow) -> str:
    """
    >>> name_of(GpuRow(0, "NVIDIA H100 80GB HBM3", "", None, None, None, None, None, [], ""))
    'H100 80GB HBM3'
    """
    return gpu.name.removeprefix("NVIDIA ")


def _held(gpu: GpuRow | GpuInstanceLine, backend: BackendRow | None) -> tuple[int, int, int]:
    """Bytes of the backend, of other programs, and of unnamed holders: the driver, or processes that are not told."""
    ours = others = 0
    for process in gpu.processes or ():
        if is_of(process, backend):
            ours += process.used_bytes or 0
        else:
            others += process.used_bytes or 0
    return ours, others, max(0, (gpu.used_bytes or 0) - ours - others)


def _models(backend: BackendRow) -> str:
    """The models its processes hold. Ollama has one process per model, and does not say which process has which."""
    if not backend.models or (backend.kind == "ollama" and len(backend.models) > 1):
        return ""
    more = len(backend.models) - 1
    return f" {backend.models[0]}{f' +{more}' if more else ''}"


def _who(gpu: GpuRow | GpuInstanceLine, drawing: Drawing, *, with_sizes: bool = True) -> Line:
    """The holders of its memory: the backend with its models first, then other programs, the largest first."""
    backend, told = drawing.backend, gpu.processes
    if told is None:
        return line(LinePart(f"processes {NOT_KNOWN}", "dim"))
    found: list[tuple[LinePart, int | None]] = []
    ours = [process for process in told if is_of(process, backend)]
    if ours and backend is not None:
        known = [process.used_bytes for process in ours if process.used_bytes is not None]
        found.append((LinePart(f"{backend.kind}{_models(backend)}", "good"), sum(known) if known else None))
    others = [process for process in told if not is_of(process, backend)]
    for process in sorted(others, key=lambda process: -(process.used_bytes or 0)):
        found.append((LinePart(f"{process.program or 'pid'} {process.pid}", "warn"), process.used_bytes))
    if not with_sizes:
        return joined([(who,) for who, _ in found], ", ")
    return joined(line(who, f" {NOT_KNOWN if used is None else size(used)}") for who, used in found)


def _head(gpu: GpuRow, drawing: Drawing) -> Line:
    """`GPU 0 ████▓▓░░ 92G/140G  87% ▁▂▃▅ H200`, or what is wrong with it."""
    label = LinePart(f"GPU {gpu.number:<2}")
    if gpu.total_bytes is None and gpu.used_bytes is None and gpu.busy_percent is None:
        name = f" ({name_of(gpu)})" if gpu.name else ""
        said = LinePart(f"! {gpu.fault}{name}", "bad") if gpu.fault else LinePart(f"{NOT_KNOWN}{name}", "dim")
        return line(label, said)
    room = drawing.width - len(label.text) - 18
    wide = max(4, min(48, room // 3))
    curve = max(0, min(40, room // 4)) if drawing.busy is not None else 0
    parts: list[LinePart | str] = [label, *drawing.bar(gpu, wide), f" {drawing.memory(gpu):>9} {_percent(gpu):>4} "]
    if curve and drawing.busy is not None and (gpu.busy_percent is not None or not gpu.instances):
        parts += [LinePart(spark(drawing.busy(gpu), curve, top=100, unicode=drawing.unicode), "good"), " "]
    return line(*parts, LinePart(name_of(gpu), "dim"), *_mig(gpu))


def _percent(gpu: GpuRow) -> str:
    return NOT_KNOWN if gpu.busy_percent is None else f"{gpu.busy_percent}%"


def _mig(gpu: GpuRow) -> Line:
    return line(LinePart(f" MIG: {len(gpu.instances)}", "dim")) if gpu.instances else ()


def _fault(gpu: GpuRow) -> list[Line]:
    """The part it refused, where it told the rest."""
    is_told = gpu.total_bytes is not None or gpu.used_bytes is not None or gpu.busy_percent is not None
    return [line(INDENT, LinePart(f"{NOT_KNOWN}: {gpu.fault}", "dim"))] if gpu.fault and is_told else []


def _each(gpu: GpuRow, drawing: Drawing) -> list[Line]:
    return [_head(gpu, drawing)]


def _with_one_line_more(gpu: GpuRow, drawing: Drawing) -> list[Line]:
    parts = [_instance(instance, drawing, bar=0) for instance in gpu.instances]
    more = joined(parts) if parts else _who(gpu, drawing)
    is_told = gpu.total_bytes is not None or gpu.used_bytes is not None
    return [_head(gpu, drawing), *_fault(gpu), *([line(INDENT, *more)] if more and is_told else [])]


def _in_full(gpu: GpuRow, drawing: Drawing) -> list[Line]:
    if not gpu.instances:
        return _with_one_line_more(gpu, drawing)
    wide = max(4, min(48, (drawing.width - 24) // 3) - 1)
    instances = [line(INDENT, *_instance(instance, drawing, bar=wide)) for instance in gpu.instances]
    return [_head(gpu, drawing), *_fault(gpu), *instances]


def _instance(instance: GpuInstanceLine, drawing: Drawing, *, bar: int) -> Line:
    """`2 ██░░ 17G/20G 1g.18gb: vllm llama 17G`."""
    name = instance.name.rpartition("MIG ")[2] or f"MIG {instance.number}"
    who = _who(instance, drawing, with_sizes=bool(bar))
    if not bar:
        return line(f"{name} {drawing.memory(instance)}", *((LinePart(" "), *who) if who else ()))
    memory = f" {drawing.memory(instance):>9} {'':>4} "
    return line(
        f"{instance.number:<1} ", *drawing.bar(instance, bar), memory, name, *((LinePart(" "), *who) if who else ())
    )


def _grid(gpus: Sequence[GpuRow], room: int, drawing: Drawing) -> list[Line]:
    """Several on a line; what is left when the room is used up is counted."""
    across = max(1, (drawing.width + 1) // GRID)
    each = max(GRID, drawing.width // across) - 1
    places = across * room
    shown = gpus if len(gpus) <= places else gpus[: places - 1]
    cells = [_cell(gpu, each, drawing) for gpu in shown]
    if len(shown) < len(gpus):
        cells.append(line(LinePart(f"and {len(gpus) - len(shown)} more", "dim")))
    return [joined(cells[start : start + across], " ") for start in range(0, len(cells), across)]


def _cell(gpu: GpuRow, width: int, drawing: Drawing) -> Line:
    label = LinePart(f"{gpu.number:<2}")
    if gpu.total_bytes is None and gpu.used_bytes is None:
        said = one_line(f"! {gpu.fault}" if gpu.fault else NOT_KNOWN, unicode=drawing.unicode)
        room = width - len(label.text)
        return line(
            label, LinePart(f"{fit(said, room, unicode=drawing.unicode):<{room}}", "bad" if gpu.fault else "dim")
        )
    figures = f" {drawing.memory(gpu):>9} {_percent(gpu):>4}"
    parts = line(label, *drawing.bar(gpu, width - len(label.text) - len(figures)), figures)
    return line(*parts, " " * (width - len(text_of([parts]))))
