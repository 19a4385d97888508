"""Places of a pipeline's parts on several GPUs, by the memory that the pool has granted on each. Standard library only.

diffusers' own `balanced` puts a part that fits nowhere in the host's memory, and says nothing (0.42.1): that memory
nobody has granted, so here it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MIB = 1 << 20
WORKING_SHARE = 0.15
"""Of a grant, kept for what an image takes beside the weights, where a pipeline is split."""


def placed(parts: Mapping[str, int], room: Sequence[int]) -> dict[str, int]:
    """The number of the device for each part: the largest part first, to where most room is left.

    `parts`: bytes of its weights by name; `room`: bytes granted on each device. With one device all is there, whatever
    it needs: the engine tells if that was too much. Raises ValueError with the part that fits nowhere.

    >>> placed({"unet": 60, "text_encoder": 30, "vae": 10}, [80, 80])
    {'unet': 0, 'text_encoder': 1, 'vae': 1}
    >>> placed({"unet": 100}, [80, 80])
    Traceback (most recent call last):
    ValueError: unet fits on no device: it takes 1 MiB, and the most that is left is 1 MiB
    """
    if len(room) <= 1:
        return dict.fromkeys(parts, 0)
    left = [int(size * (1 - WORKING_SHARE)) for size in room]
    found: dict[str, int] = {}
    for name in sorted(parts, key=lambda name: (-parts[name], name)):
        device = max(range(len(left)), key=lambda index: (left[index], -index))
        if parts[name] > left[device]:
            raise ValueError(
                f"{name} fits on no device: it takes {_mib(parts[name])} MiB, "
                f"and the most that is left is {_mib(left[device])} MiB"
            )
        left[device] -= parts[name]
        found[name] = device
    return found


def devices_of(told: Sequence[str]) -> tuple[list[str], list[int]]:
    """The devices of flags `DEVICE[=MIB]`, and the bytes granted on each (0: not said). Raises ValueError.

    >>> devices_of(["cuda:0=100", "cuda:1=50"])
    (['cuda:0', 'cuda:1'], [104857600, 52428800])
    """
    pairs = [one.partition("=") for one in told]
    if any(not name or (size and not size.isdigit()) for name, _, size in pairs):
        raise ValueError(f"--device is DEVICE or DEVICE=MIB, not {' '.join(told)}")
    return [name for name, _, _ in pairs], [int(size or 0) * MIB for _, _, size in pairs]


def _mib(size: int) -> int:
    return -(-size // MIB)
