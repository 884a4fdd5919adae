# SPDX-License-Identifier: Apache-2.0
"""Seconds and joules of calls, on a GPU or the CPU. What the benches of this folder share."""

import ctypes
import glob
import pathlib
import statistics
import time

import torch

SECONDS = {"cuda": 0.02, "cpu": 0.1}  # of one measurement, about
BATCH = 0.01  # seconds between two looks at an energy counter, about
MOVES = 10  # of an energy counter, that a figure spans; they come every 1 to 100 ms
SLOW = 3.0  # seconds after which fewer will do, where a call is longer than what lies between two
STUCK = 2.0  # seconds after which a counter that has not moved will not
REST = 0.25  # seconds of rest before each figure: a card at its power limit lowers its clock after about 0.1 s


def wait(device):
    """Until the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()


def elapsed(call, count, device):
    """Seconds of one of `count` calls: events around them on a GPU, the clock on the CPU."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / count


def seconds_of(call, device="cuda", seconds=None, samples=5, rest=REST):
    """Of one call: after a rest, as many as take `seconds`, median of `samples` such measurements."""
    wait(device)
    time.sleep(rest)
    count = max(1, round((seconds or SECONDS[device]) / max(elapsed(call, 1, device), 1e-6)))
    return statistics.median(elapsed(call, count, device) for _ in range(samples))


class Nvml:
    """The energy counter of the current GPU, by the driver's own library."""

    source = "NVML"

    def __init__(self):
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        self.check(self.library.nvmlInit_v2())
        self.check(self.library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self.handle)))
        self.joules()

    def check(self, status):
        if status != 0:
            raise OSError(f"NVML status {status}")

    def joules(self):
        millijoules = ctypes.c_ulonglong()
        self.check(self.library.nvmlDeviceGetTotalEnergyConsumption(self.handle, ctypes.byref(millijoules)))
        return millijoules.value * 1e-3


class Rapl:
    """The energy counters of the CPU's packages. They wrap around at their range."""

    source = "RAPL"

    def __init__(self, root="/sys/class/powercap"):
        self.packages = [pathlib.Path(path) for path in sorted(glob.glob(f"{root}/intel-rapl:[0-9]"))]
        if not self.packages:
            raise OSError("no RAPL counters")
        self.ranges = [int((package / "max_energy_range_uj").read_text()) for package in self.packages]
        self.last, self.total = self.read(), 0

    def read(self):
        return [int((package / "energy_uj").read_text()) for package in self.packages]

    def joules(self):
        now = self.read()
        self.total += sum((new - old) % (most + 1) for new, old, most in zip(now, self.last, self.ranges))
        self.last = now
        return self.total * 1e-6


def energy_meter(device):
    """An object with joules() and source, or None where no counter can be read."""
    try:
        return Nvml() if device == "cuda" else Rapl()
    except (OSError, AttributeError, ValueError, RuntimeError):
        return None


def joules_of(call, device, meter, seconds):
    """Of one call, or None where the counter stands still: from one of its moves to another, `seconds` later or more."""
    wait(device)
    time.sleep(REST)
    count = max(1, round(BATCH / max(elapsed(call, 1, device), 1e-6)))
    last, moved, begin = meter.joules(), time.perf_counter(), None
    calls = moves = 0
    while True:
        elapsed(call, count, device)
        calls += count
        joules, now = meter.joules(), time.perf_counter()
        if joules == last:
            if now - moved > STUCK:
                return None
            continue
        last, moved = joules, now
        if begin is None:
            begin, start, calls = joules, now, 0
            continue
        moves += 1
        if now - start >= seconds and (moves >= MOVES or now - start >= SLOW):
            return (joules - begin) / calls
