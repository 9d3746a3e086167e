"""Build hook: compiles the CPU kernel beside its source, once for each instruction set.

Without a C++ compiler the package is installed without it and stays complete: the tiled torch
operators serve the same calls. SCALEDOT_NATIVE=0 skips the compiler, SCALEDOT_NATIVE=1 insists.
"""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/scaledot/backends/cpu/native"
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
BUILDS = {
    "x86_64": {
        "kernel-avx512.so": [*AVX512, "-mprefer-vector-width=512"],
        "kernel-avx2.so": ["-mavx2", "-mfma"],
        "kernel-generic.so": [],
    }
}
GENERIC: dict[str, list[str]] = {"kernel-generic.so": []}


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("SCALEDOT_NATIVE", "")
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if wish == "0" or self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        if compiler is None:
            self._give_up("no C++ compiler (g++ or clang++) was found", wish)
            return
        folder = pathlib.Path(self.root, FOLDER)
        built = []
        for name, flags in BUILDS.get(platform.machine(), GENERIC).items():
            target = folder / name
            command = [compiler, *FLAGS, *flags, "-o", str(target), str(folder / "kernel.cpp")]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                self._give_up(f"{' '.join(command)}: {result.stderr.strip()[-500:]}", wish)
                continue
            built.append(target.relative_to(self.root))
        if built:
            build_data["artifacts"] += [f"/{path}" for path in built]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def _give_up(self, reason: str, wish: str) -> None:
        if wish == "1":
            raise RuntimeError(f"the CPU kernel could not be built: {reason}")
        self.app.display_warning(f"scaledot goes on without its compiled CPU kernel: {reason}")
