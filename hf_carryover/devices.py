"""Where to run, and in which precision."""

import time

import torch
from torch.nn.functional import linear


def best_device() -> torch.device:
    """`torch.device`: The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def fastest_dtype(device: torch.device) -> torch.dtype:
    """
    bf16 if `device` multiplies a block of 8 rows faster in it than in fp32, else fp32.

    Some CPUs emulate bf16 and are many times slower in it, others have instructions for it: a trial of some
    milliseconds tells which.
    """
    return min((torch.float32, torch.bfloat16), key=lambda dtype: _seconds_per_block(device, dtype))


@torch.no_grad()
def _seconds_per_block(device: torch.device, dtype: torch.dtype, trials: int = 5) -> float:
    rows = torch.ones(8, 1024, device=device, dtype=dtype)
    weights = [torch.ones(1024, 1024, device=device, dtype=dtype) for _ in range(16)]  # more than a core's cache holds
    seconds = []
    for _ in range(1 + trials):
        start = time.perf_counter()
        total = sum(linear(rows, weight).sum() for weight in weights)
        float(total)  # waits for the device
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first one warms up
