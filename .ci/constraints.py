"""Writes constraints.txt: the exact version of everything that ``EXTRAS`` bring, on both Pythons.

Run by ``make constraints`` as ``constraints.py PYTHON3.11 PYTHON3.12``; uses the standard library
alone. Versions that differ between the two carry a marker. Only names and versions are written, so
that the file holds for any package index and platform.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "dev,docs,minari,parquet"
"""Those that are small; torch, CUDA and the like follow the machine."""
HEADER = "# Written by `make constraints`; Python 3.11 and later ones differ where a line has a marker.\n"


def resolve(python: str) -> dict[str, str]:
    """Package -> version after installing ``EXTRAS`` into a new environment of this Python."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        # setuptools by name: an environment of Python 3.11 begins with an old one, which pip would keep.
        project = f"{ROOT}[{EXTRAS}]"
        subprocess.run([*pip, "install", "--quiet", "-U", "setuptools", "-e", project], check=True)
        freeze = [*pip, "freeze", "--all", "--exclude-editable", "--exclude", "pip"]
        lines = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split("==") for line in lines)


def merge(older: dict[str, str], newer: dict[str, str]) -> list[str]:
    """Lines of constraints.txt for the versions found on Python 3.11 and on Python 3.12."""
    lines = []
    for name in sorted(older.keys() | newer.keys(), key=str.lower):
        if older.get(name) == newer.get(name):
            lines.append(f"{name}=={older[name]}")
            continue
        for versions, marker in ((older, '< "3.12"'), (newer, '>= "3.12"')):
            if name in versions:
                lines.append(f"{name}=={versions[name]} ; python_version {marker}")
    return lines


if __name__ == "__main__":
    lines = merge(*(resolve(python) for python in sys.argv[1:]))
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n")
