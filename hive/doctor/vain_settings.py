"""Settings that are right and have no effect, for `hive config check`. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hive.backends.entries import entries_of
from hive.backends.entry_sleep import why_no_sleep
from hive.backends.launch import without_ram_cache
from hive.backends.slot_place import why_no_slots
from hive.backends.speculation import why_vain
from hive.settings.table import Settings


def settings_in_vain(settings: Settings, told: Collection[str], *, is_installed: bool = False) -> list[str]:
    """The settings that are right and have no effect, sentences. `told`: the settings that were written, as
    `section.key`; `is_installed`: they are those of an installed Hive.

    >>> from hive.settings.pool import ModelRow, PoolSection
    >>> described = {"q": ModelRow(file="/q.gguf")}
    >>> settings_in_vain(Settings(models=described), ["model q.sleep"])
    ['[model q] sleep has no effect: llama-server has no sleep']
    >>> settings_in_vain(Settings(models=described, pool=PoolSection(host_ram_mb=1024)), [])
    ['[pool] host_ram_mb has no effect: no model described here may sleep (q: llama-server has no sleep)']
    >>> settings_in_vain(Settings(models=described), [])
    []
    >>> from hive.settings.table import InferenceSection, TenantRow
    >>> kept = InferenceSection(llama_cache_ram_mb=512)
    >>> settings_in_vain(Settings(inference=kept, tenants={"acme": TenantRow()}), [])
    ['[inference] llama_cache_ram_mb has no effect: tenants are of more than one cache group']
    >>> slots = Settings(inference=InferenceSection(llama_slot_dir="/d"))
    >>> settings_in_vain(slots, []), settings_in_vain(slots, [], is_installed=True)[0][:54]
    ([], '[inference] llama_slot_dir has no effect: an installed')
    """
    pool = settings.pool
    reasons = {entry.name: (entry, why_no_sleep(entry, pool)) for entry in entries_of(settings).values()}
    said = [
        f"{entry.origin} sleep has no effect: {why}"
        for name, (entry, why) in reasons.items()
        if why and entry.row.sleep and f"model {name}.sleep" in told
    ]
    if pool.host_ram_mb and all(why for _, why in reasons.values()):
        first = next((f" ({name}: {why})" for name, (_, why) in reasons.items()), "")
        said.append(f"[pool] host_ram_mb has no effect: no model described here may sleep{first}")
    said += [f"[inference] {why}" for why in why_vain(settings.inference)]
    if settings.inference.llama_cache_ram_mb != without_ram_cache(settings).llama_cache_ram_mb:
        said.append("[inference] llama_cache_ram_mb has no effect: tenants are of more than one cache group")
    if why := why_no_slots(settings.inference, is_apart=is_installed):
        said.append(f"[inference] llama_slot_dir has no effect: {why}")
    return said
