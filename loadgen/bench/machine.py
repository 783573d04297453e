"""What a figure was measured on, in one line."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def describe() -> str:
    """Processor, cores, instruction sets that matter, and the date."""
    model, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = value
                break
    features = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags.split()]
    return f"{model}, {os.cpu_count()} cores ({', '.join(features) or 'no avx512'}), {datetime.now(UTC):%Y-%m-%d}"
