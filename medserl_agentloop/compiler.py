"""CUDA's compiler and libraries from NVIDIA's wheels, for programs that search for them outside of
Python.
"""

import os
import subprocess
import sysconfig
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path


def use_wheels() -> None:
    """Show the loader the wheels' libraries, and name their compiler in ``CUDA_HOME`` if nothing is
    named there.

    SGLang preloads torch_memory_saver's hook into its scheduler. The hook does not say where CUDA's
    runtime is, so the loader would end that process with code 127.

    SGLang and flashinfer call the compiler at run time. It lacks what a linker asks for: lib64, a
    library without its version, a stand-in for the driver's.
    """
    home = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if (home / "lib" / "libcudart.so.13").exists():
        show_loader(home / "lib", os.environ)
    if (
        os.environ.get("CUDA_HOME")
        or os.environ.get("CUDA_PATH")
        or not (home / "bin" / "nvcc").exists()
    ):
        return
    os.environ["CUDA_HOME"] = str(home)
    if not (home / "lib64").exists():
        stub = home / "lib" / "stubs" / "libcuda.so"
        command = ("c++", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c++", os.devnull, "-o")
        with suppress(
            OSError, subprocess.CalledProcessError
        ):  # medserl doctor says what is missing
            stub.parent.mkdir(exist_ok=True)
            subprocess.run([*command, stub], check=True, capture_output=True)
            stub.with_name("libcuda.so.1").symlink_to(stub.name)
            (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
            (home / "lib64").symlink_to("lib")


def show_loader(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Put a folder last on the path of the loader, where it hides nothing of the user's."""
    known = [place for place in environment.get("LD_LIBRARY_PATH", "").split(":") if place]
    if str(folder) not in known:
        environment["LD_LIBRARY_PATH"] = ":".join([*known, str(folder)])
