"""What a process that is sure to need torch does before and while it imports it: the first seconds of a start.

Imports neither torch nor anything else of the package. As a program, `python -m funcllm.launch.early MODULE:FUNCTION
DEVICE [ARGUMENT ...]` imports a module in this way and calls its function with the list of arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from importlib import import_module


@contextlib.contextmanager
def importing(device: str | None = None) -> Iterator[None]:
    """For the imports of a command: without garbage collection, and with the GPU's context made on a thread meanwhile.

    What the imports make lives as long as the process, so later collections pass over it. device: as `Engine` takes it.
    Does nothing where torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    index = gpu_index(device)
    if index is not None:
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch has it, and read by the driver at its start
        threading.Thread(target=open_context, args=(index,), name="CUDA context", daemon=True).start()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def gpu_index(device: str | None) -> int | None:
    """The GPU that `device` names, None for none or where a launcher deals them out; without a device the first."""
    name, _, index = (device or "cuda").partition(":")
    if name != "cuda" or "LOCAL_RANK" in os.environ:
        return None
    return int(index) if index.isdecimal() else 0


def open_context(index: int) -> bool:
    """Makes the GPU's primary context, which torch then finds; whether there was a driver and a GPU to do so.

    By the driver alone, in a second or so in which Python goes on.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )


if __name__ == "__main__":
    module_name, _, function_name = sys.argv[1].partition(":")
    with importing(sys.argv[2]):
        function = getattr(import_module(module_name), function_name)
    function(sys.argv[3:])
