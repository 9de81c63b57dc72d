"""CUDA's compiler, which SGLang and flashinfer call at run time, from NVIDIA's wheels."""

import os
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path


def use_wheels() -> None:
    """Name the compiler of the wheels in ``CUDA_HOME``, if they are installed and nothing is named there.

    They lack what a linker asks for: lib64, a library without its version, a stand-in for the driver's.
    """
    home = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or not (home / "bin" / "nvcc").exists():
        return
    os.environ["CUDA_HOME"] = str(home)
    if not (home / "lib64").exists():
        stub = home / "lib" / "stubs" / "libcuda.so"
        command = ("c++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull, "-o")
        with suppress(OSError, subprocess.CalledProcessError):  # medserl doctor says what is missing
            stub.parent.mkdir(exist_ok=True)
            subprocess.run([*command, stub], check=True, capture_output=True)
            (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
            (home / "lib64").symlink_to("lib")
