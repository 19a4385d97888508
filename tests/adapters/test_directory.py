"""The directory of adapters: each there whole or not at all, whenever who writes it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hive.adapters.directory import BESIDE, RECORD, AdapterDirectory
from hive.adapters.record import AdapterRecord
from hive.errors import AdapterNotFound, BadRequest
from tests.adapters.lora_files import Box

STEPS = {"open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}
"""Audit events of Python: what an install does to a disk is between two of them."""
STEPS_MAX = 300


def killed_at(step: int, act: Callable[[], object]) -> bool:
    """Does it in a child that is killed (-9) before its `step`-th touch of the disk; False where it was done before."""
    child = os.fork()
    if child == 0:
        left = [step]

        def hook(event: str, _: tuple[object, ...]) -> None:
            if event in STEPS:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def whole(directory: AdapterDirectory) -> list[AdapterRecord]:
    """The records, each of which really has its files as they were."""
    records = directory.records()
    for record in records:
        directory.check(record)
    return records


def leftovers(directory: AdapterDirectory) -> list[str]:
    """All that is there and belongs to no record."""
    known = {directory.place(record) for record in directory.records()}
    return [str(path) for path in directory.root.rglob("*") if path.is_file() and path.parent not in known]


def test_kill_9_at_every_step_of_an_install_leaves_all_of_it_or_nothing(box: Box) -> None:
    source = box.signed()
    seen = set()
    for step in range(1, STEPS_MAX):
        is_killed = killed_at(step, lambda: box.install(source))
        seen.add(len(whole(box.adapters)))
        box.adapters.tidy()
        assert not leftovers(box.adapters), step
        assert not (box.adapters.root / BESIDE).exists()
        if not is_killed:
            break
        assert box.install(source).name == "legal"
        shutil.rmtree(box.adapters.root)
    assert step > 20
    assert seen == {0, 1}


def test_kill_9_at_every_step_of_another_install_of_the_same_leaves_what_was_there(box: Box) -> None:
    source = box.signed()
    first = box.install(source, now=lambda: 1.0)
    for step in range(1, STEPS_MAX):
        is_killed = killed_at(step, lambda: box.install(source, now=lambda: 2.0))
        assert [record.digest for record in whole(box.adapters)] == [first.digest]
        box.adapters.tidy()
        assert not leftovers(box.adapters), step
        if not is_killed:
            break
    assert box.adapters.find("legal").installed_at == 2.0


def test_kill_9_at_every_step_of_a_removal_leaves_all_of_it_or_nothing(box: Box) -> None:
    source, seen = box.signed(), set()
    for step in range(1, STEPS_MAX):
        record = box.install(source)
        is_killed = killed_at(step, lambda record=record: box.adapters.remove(record))  # type: ignore[misc]
        seen.add(len(whole(box.adapters)))
        box.adapters.tidy()
        assert not leftovers(box.adapters), step
        if not is_killed:
            break
    assert seen == {0, 1}
    assert not box.there()


def test_of_installs_of_the_same_at_once_none_takes_away_what_another_has_put(box: Box) -> None:
    """The second one found nothing, removed what the first had put meanwhile, and put its own."""
    source, other = box.signed(), box.signed("other", fill=2)
    record = box.install(source, name="x")
    gone, is_done = [], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            if record.digest not in {one.digest for one in box.adapters.records()}:
                gone.append(1)

    def act(number: int) -> None:
        if number % 3:
            box.install(source, name="x")
        else:
            box.adapters.remove(box.install(other, name="x"))

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=act, args=(number,)) for number in range(12)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    watcher.join()
    assert not gone
    assert whole(box.adapters)
    assert not leftovers(box.adapters)


@pytest.mark.parametrize("what", ["no record", "cut record", "another's record", "file short", "file gone"])
def test_a_directory_without_a_whole_record_is_nothing_and_is_cleaned(box: Box, what: str) -> None:
    record = box.install(box.signed())
    other = box.install(box.signed("other", fill=2))
    place = box.adapters.place(record)
    told = place / RECORD
    if what == "no record":
        told.unlink()
    elif what == "cut record":
        content = told.read_bytes()
        told.unlink()
        told.write_bytes(content[:-20])
    elif what == "another's record":
        told.unlink()
        told.write_bytes((box.adapters.place(other) / RECORD).read_bytes())
    elif what == "file short":
        os.truncate(place / record.files[0].path, 1)
    else:
        (place / record.files[0].path).unlink()
    assert box.adapters.records() == [other]
    assert box.adapters.tidy() == [f"legal@{record.digest}"]
    assert not place.parent.exists()
    assert box.adapters.records() == [other]


def test_what_is_no_adapter_stays_as_it_is(box: Box) -> None:
    box.install(box.signed())
    (box.adapters.root / "notes.txt").write_text("mine")
    (box.adapters.root / "legal" / "README").write_text("mine")
    assert box.adapters.tidy() == []
    assert (box.adapters.root / "notes.txt").exists()
    assert len(box.adapters.records()) == 1


def test_an_adapter_is_found_by_name_and_by_the_begin_of_its_digest(box: Box) -> None:
    old = box.install(box.signed(), now=lambda: 1.0)
    new = box.install(box.signed("x", fill=2), name="legal", now=lambda: 2.0)
    find = box.adapters.find
    assert find("legal") == new
    assert find("legal", old.digest[:8]) == find(old.engine_name) == find("legal", old.digest) == old
    with pytest.raises(AdapterNotFound, match="there is no adapter 'medical'") as error:
        find("medical")
    assert "hive adapter list" in error.value.hint
    with pytest.raises(AdapterNotFound, match="is installed, but not as ffffffff"):
        find("legal", "ffffffff")
    with pytest.raises(BadRequest, match="is no digest"):
        find("legal", "../..")
    with pytest.raises(AdapterNotFound):
        find("../legal")


def test_what_is_removed_is_gone_and_the_others_of_its_name_are_not(box: Box) -> None:
    old = box.install(box.signed())
    new = box.install(box.signed("x", fill=2), name="legal")
    box.adapters.remove(old)
    assert box.adapters.records() == [new]
    box.adapters.remove(new)
    box.adapters.remove(new)
    assert not (box.adapters.root / "legal").exists()


def test_there_are_none_where_there_is_no_directory(tmp_path: Path) -> None:
    directory = AdapterDirectory(tmp_path / "none")
    assert (directory.records(), directory.tidy()) == ([], [])
    assert not directory.root.exists()


def test_a_record_is_json_that_says_all_of_it(box: Box) -> None:
    record = box.install(box.signed())
    told = msgspec.json.decode((box.adapters.place(record) / RECORD).read_bytes())
    assert told["key_id"] == box.key.public.id
    assert [file["path"] for file in told["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
