"""Packs what ``benchmarks/gpu.py --engine none`` needs beside torch, for a machine that reaches
nothing, in 64 MiB.

python benchmarks/gpu_bundle.py bundle 3.12                                  # a new folder; Python
there python -m pip install --no-index --no-deps --target site bundle/*.whl        # there, beside a
checkout PYTHONPATH=site:bundle python benchmarks/gpu.py --output out --engine none
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = """
accelerate annotated-doc annotated-types anyio cachetools certifi click cloudpickle codetiming \
diskcache h11 httpcore
httpx huggingface_hub hydra-core idna importlib_metadata markdown-it-py mdurl msgspec omegaconf \
orjson packaging peft
psutil pydantic pydantic_core pygments pyvers PyYAML pyzmq RapidFuzz regex rich safetensors \
shellingham tensordict
tokenizers tqdm TransferQueue transformers typer typing-inspection verl zipp
"""
STAND_IN = '''"""Stands in for Ray, and for what else verl imports and one process does not use."""

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

ABSENT = ("ray", "datasets", "fastapi", "pandas", "PIL", "uvicorn")


class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec):
        return MagicMock(__path__=[])

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())  # asked last: what is installed goes first
is_initialized, __getattr__ = bool, MagicMock()
'''


def main(folder: Path, python: str) -> None:
    """Download the wheels of constraints-cpu.txt for x86-64, and build this package's own."""
    (folder / "ray").mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    pip, locked = (
        [sys.executable, "-m", "pip"],
        ["--no-deps", "--quiet", "-c", ROOT / "constraints-cpu.txt"],
    )
    there = [
        f"--platform={name}_x86_64"
        for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
    ]
    there += ["--python-version", python, *PACKAGES.split()]
    subprocess.run([*pip, "download", *locked, "--dest", folder, *there], check=True)
    pure = [ROOT, "antlr4-python3-runtime"]  # no wheel of the second is published
    subprocess.run([*pip, "wheel", *locked, "--wheel-dir", folder, *pure], check=True)
    print(f"{sum(file.stat().st_size for file in folder.rglob('*')) / 2**20:.1f} MiB of 64")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
