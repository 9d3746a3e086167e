"""Build hook: compiles the CPU kernel, and builds the lab's page, before a wheel is made.

The kernel is compiled beside its source, once for each instruction set. Without a C++ compiler the
package is installed without it and stays complete: the tiled torch operators serve the same calls.
SCALEDOT_NATIVE=0 skips the compiler, SCALEDOT_NATIVE=1 insists.

The page needs node (build_page.py says which), unless a source distribution brought it along. A
wheel without the page is only built where SCALEDOT_SKIP_PAGE=1 asks for it; an editable install,
whose page `make page` can add, goes on without.
"""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # hatchling loads this file alone

import build_page

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
    def dependencies(self) -> list[str]:
        """What the build's own environment needs besides hatchling."""
        root = pathlib.Path(self.root)
        ready = _skips_page() or build_page.is_built(root) or build_page.find_npm()
        return [] if ready else [build_page.PACKAGE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not _skips_page():
            self._build_page(editable=version == "editable")
            build_data["artifacts"].append(f"/{build_page.BUILT}/**")
        if self.target_name == "wheel":
            self._compile(build_data)

    def _build_page(self, *, editable: bool) -> None:
        try:
            build_page.build(pathlib.Path(self.root))
        except build_page.NoPage as reason:
            if not editable:
                raise
            self.app.display_warning(f"scaledot goes on without the lab's page: {reason}")

    def _compile(self, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("SCALEDOT_NATIVE", "")
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if wish == "0" or not sys.platform.startswith("linux"):
            return
        if compiler is None:
            self._give_up("no C++ compiler (g++ or clang++) was found", wish)
            return
        folder = pathlib.Path(self.root, FOLDER)
        built = []
        for name, flags in BUILDS.get(platform.machine(), GENERIC).items():
            target = folder / name
            # Written aside and renamed: who loads it, or builds it too, never meets half a file.
            aside = folder / f"{os.getpid()}-{name}"
            command = [compiler, *FLAGS, *flags, "-o", str(aside), str(folder / "kernel.cpp")]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                aside.unlink(missing_ok=True)
                self._give_up(f"{' '.join(command)}: {result.stderr.strip()[-500:]}", wish)
                continue
            aside.replace(target)
            built.append(target.relative_to(self.root))
        if built:
            build_data["artifacts"] += [f"/{path}" for path in built]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def _give_up(self, reason: str, wish: str) -> None:
        if wish == "1":
            raise RuntimeError(f"the CPU kernel could not be built: {reason}")
        self.app.display_warning(f"scaledot goes on without its compiled CPU kernel: {reason}")


def _skips_page() -> bool:
    return os.environ.get("SCALEDOT_SKIP_PAGE") == "1"
