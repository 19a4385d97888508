"""Takes memory of the first GPU that it sees, by NVIDIA's driver alone: `take_memory.py [MIB]`.

Orders come on stdin, one a line: `take 500` (MiB), `leave 2000` (takes all but so much), `free`. Each is answered with
what is held, in MiB, and the driver's error (0: none). It ends with its stdin.
"""

from __future__ import annotations

import ctypes
import json
import sys

MIB = 1 << 20


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    asked = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )
    if asked:
        raise SystemExit(f"NVIDIA's driver answers with error {asked}")
    held: list[tuple[ctypes.c_uint64, int]] = []

    def take(mib: int) -> int:
        at = ctypes.c_uint64()
        error = int(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(mib * MIB)))
        if not error:
            held.append((at, mib))
        return error

    def obey(order: str) -> int:
        verb, _, told = order.partition(" ")
        if verb == "free":
            while held:
                cuda.cuMemFree_v2(held.pop()[0])
            return 0
        if verb == "take":
            return take(int(told))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return take(max(1, free.value // MIB - int(told)))

    for order in [f"take {words}" for words in sys.argv[1:]]:
        print(json.dumps({"error": obey(order), "held": sum(mib for _, mib in held)}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"error": obey(line.strip()), "held": sum(mib for _, mib in held)}), flush=True)


if __name__ == "__main__":
    main()
