"""Where the benchmarks of the store keep their figures: benchmarks/results/store.json.

One record per benchmark and case; a new run takes the place of the old record.
"""

import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results/store.json")
PACKAGES = ("torch", "zarr", "numcodecs", "zstandard", "safetensors", "numpy")


def keep(benchmark: str, case: str, figures: Any) -> None:
    """Print one record and put it into the file."""
    record = {
        "benchmark": benchmark,
        "case": case,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "versions": {name: version(name) for name in PACKAGES},
        "figures": figures,
    }
    print(json.dumps(record, indent=1), flush=True)
    records = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    same = (benchmark, case)
    records = [each for each in records if (each["benchmark"], each["case"]) != same]
    records.append(record)
    records.sort(key=lambda each: (each["benchmark"], each["case"]))
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


def machine() -> str:
    """Processor and number of cores."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores, {models[0] if models else platform.processor()}"
