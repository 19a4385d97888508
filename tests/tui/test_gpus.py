"""The pane of GPUs, over what NVIDIA's wrapper says of a fake driver: 0, 1, 8 GPUs, MIG, one that is lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from hive.tui.gpus import Drawing, gpu_lines
from hive.tui.history import LOOKS, History
from hive.tui.lines import text_of
from hive.tui.panes import plain
from hive.tui.snapshot import BackendRow, GpuRow
from tests.fakes.fake_nvml import GIB, NOT_AVAILABLE, Gpu, Library
from tests.tui import frozen


def lines(
    gpus: list[GpuRow],
    room: int = 100,
    *,
    width: int = 80,
    backend: BackendRow | None = frozen.VLLM,
    busy: Sequence[float | None] = (0, 50, 100),
    unicode: bool = True,
) -> list[str]:
    drawing = Drawing(width, backend, lambda _: busy, unicode)
    return text_of(gpu_lines(gpus, room, drawing)).splitlines()


def test_a_gpu_says_how_full_and_busy_it_is_was_and_by_whom() -> None:
    assert lines(frozen.one_gpu()) == [
        "GPU 0 ████████████▓▓▒░░░ 107G/140G  87%            ▁▄█ H200",
        "      vllm llama-3.1-70b 93G · python3 5000 12G · pid 6000 n/a",
    ]


def test_it_says_so_in_ascii_too() -> None:
    found = lines(frozen.one_gpu(), unicode=False)
    assert found[0] == "GPU 0 ############++-... 107G/140G  87%            .=# H200"
    assert all(line.isascii() for line in found)


def test_where_the_backend_is_another_its_programs_are_programs() -> None:
    other = msgspec.structs.replace(frozen.VLLM, kind="llama")
    for backend in (other, None):
        assert "VLLM::EngineCor 4711 92G" in lines(frozen.one_gpu(), backend=backend, width=120)[1]


@pytest.mark.parametrize(
    ("kind", "models", "said"),
    [
        ("vllm", ["a"], "vllm a 2.0G"),
        ("vllm", ["a", "lora-b", "lora-c"], "vllm a +2 2.0G"),
        ("llama", ["a"], "llama a 2.0G"),
        ("ollama", ["a", "b"], "ollama 2.0G"),
        ("ollama", [], "ollama 2.0G"),
    ],
)
def test_of_several_models_it_is_not_said_which_where_nobody_knows(kind: str, models: list[str], said: str) -> None:
    program = {"vllm": "VLLM::EngineCor", "llama": "llama-server", "ollama": "ollama"}[kind]
    backend = msgspec.structs.replace(frozen.VLLM, kind=kind, models=models)
    gpu = frozen.gpus_of(Library(Gpu(used=3 * GIB, processes=[(4711, 2 * GIB)])))[0]
    assert gpu.processes is not None
    known = msgspec.structs.replace(gpu, processes=[msgspec.structs.replace(gpu.processes[0], program=program)])
    assert lines([known], backend=backend)[1].strip() == said


def test_what_the_driver_does_not_say_is_not_available() -> None:
    unknown = Gpu(refuses=dict.fromkeys(("GetMemoryInfo", "GetUtilizationRates", "GetComputeRunningProcesses"), 3))
    assert lines(frozen.gpus_of(Library(unknown))) == ["GPU 0 n/a (H200)"]
    partly = Gpu(used=20 * GIB, refuses={"GetComputeRunningProcesses": 3, "GetUtilizationRates": 3})
    found = lines(frozen.gpus_of(Library(partly)), busy=())
    assert found[0].split() == ["GPU", "0", "▒▒▒░░░░░░░░░░░░░░░", "20G/140G", "n/a", "H200"]
    assert found[1].strip() == "processes n/a"
    uncounted = frozen.gpus_of(Library(Gpu(used=GIB, processes=[(4711, NOT_AVAILABLE)])))
    assert lines(uncounted)[1].strip() == "vllm llama-3.1-70b n/a"


def test_a_lost_gpu_says_so_and_keeps_no_other_from_being_seen() -> None:
    found = lines(frozen.lost())
    assert found[-1] == "GPU 1 ! GPU is lost"
    assert "20G/140G" in found[0]


def test_without_a_gpu_there_is_nothing() -> None:
    assert lines(frozen.gpus_of(Library())) == []
    assert "GPU" not in plain(frozen.look(), 120, unicode=True)


def test_each_mig_device_says_who_uses_it() -> None:
    found = lines(frozen.mig(), width=100)
    assert found[0].endswith("65G/104G  n/a H200 MIG: 3")
    assert [line.split()[0] for line in found[2:]] == ["0", "2", "3"]
    assert found[2].endswith("3g.71gb vllm llama-3.1-70b 60G")
    assert found[3].endswith("1g.18gb python3 5000 3.0G")
    assert lines(frozen.mig(), 3, width=100)[2].strip().startswith("3g.71gb 61G/70G vllm llama-3.1-70b · 1g.18gb 4.0G")


@pytest.mark.parametrize(
    ("room", "width", "count"),
    [(16, 120, 14), (13, 120, 8), (8, 120, 8), (7, 120, 2), (3, 80, 3), (2, 80, 2), (1, 80, 1)],
)
def test_eight_gpus_take_no_more_lines_than_there_are(room: int, width: int, count: int) -> None:
    found = lines(frozen.eight_gpus(), room, width=width)
    assert len(found) == count
    assert all(len(line) <= width for line in found)
    assert "GPU is lost" in "\n".join(found) or "more" in found[-1]


def test_gpus_that_have_no_room_are_counted() -> None:
    assert lines(frozen.eight_gpus(), 1)[0].endswith("and 6 more")


@pytest.mark.parametrize("width", [1, 10, 20, 26, 40, 52, 80, 200])
@pytest.mark.parametrize("room", [1, 3, 100])
def test_no_line_is_wider_than_the_pane(width: int, room: int) -> None:
    for gpus in (frozen.one_gpu(), frozen.eight_gpus(), frozen.mig(), frozen.lost()):
        assert all(len(line) <= width for line in lines(gpus, room, width=width))


def test_once_prints_them_without_curves() -> None:
    text = plain(frozen.look(gpus=frozen.one_gpu()), 100, unicode=True)
    assert "107G/140G  87% H200" in text
    assert "vllm llama-3.1-70b 93G" in text
    assert "acme       " in text


# --- curves ----------------------------------------------------------------------------------------------------------


def test_the_history_has_a_gap_where_a_look_said_nothing() -> None:
    history = History()
    gpu = frozen.one_gpu()[0]
    quiet = msgspec.structs.replace(gpu, busy_percent=None)
    for look in (frozen.look(gpus=[gpu]), frozen.look(gpus=[quiet]), frozen.down(), frozen.look(gpus=[gpu])):
        history.add(look)
    assert history.busy_percent_of(gpu) == [87, None, None, 87]
    assert history.tokens_per_s() == [83.4, 83.4, None, 83.4]
    assert history.tokens_per_s_of(frozen.AGENTS[0].id) == [83.4, 83.4, None, 83.4]
    assert history.tokens_per_s_of("somebody") == [0.0, 0.0, None, 0.0]


def test_the_history_keeps_no_more_than_it_shows_and_forgets_who_is_gone() -> None:
    history = History()
    history.add(frozen.look())
    for _ in range(3 * LOOKS):
        history.add(frozen.look(agents=[frozen.row("x", tokens_per_s=1.0)]))
    assert len(history.tokens_per_s()) == LOOKS
    assert len(history.tokens_per_s_of(frozen.row("x").id)) == LOOKS
    assert set(history._agents) == {frozen.row("x").id}
