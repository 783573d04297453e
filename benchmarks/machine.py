"""What a figure was measured on, in one line."""

import os
from datetime import UTC, datetime

from engine.machine.facts import read_processor


def describe() -> str:
    """Processor, cores, instruction sets that matter, and the date."""
    processor = read_processor()
    features = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in processor.features]
    found = ", ".join(features) or "no avx512"
    return f"{processor.name}, {os.cpu_count()} cores ({found}), {datetime.now(UTC):%Y-%m-%d}"
