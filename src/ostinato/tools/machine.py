"""The machine and versions with which a result was measured."""

import datetime
import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from ostinato import __version__


def machine() -> dict[str, Any]:
    """Machine, versions and date, for the head of a result file."""
    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "ostinato": __version__,
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        try:
            import triton

            described["triton"] = triton.__version__
        except ImportError:
            pass
    return described


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return _name_by_lscpu() or platform.machine()


def _name_by_lscpu() -> str | None:
    """On Arm the kernel gives only numbers; lscpu knows their names."""
    if shutil.which("lscpu") is None:
        return None
    output = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    for line in output.splitlines():
        if line.startswith("Model name"):
            return line.split(":", 1)[1].strip()
    return None
