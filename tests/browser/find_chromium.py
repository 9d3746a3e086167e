"""A Chromium for the tests of the page: found, or installed where that is allowed.

python tests/browser/find_chromium.py    say where it is, or why there is none
"""

import os
import shutil
import subprocess
import sys

VARIABLE = "SCALEDOT_CHROMIUM"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium-headless-shell", "chromium")  # Debian's; the second is where the first is not


def find() -> str | None:
    """SCALEDOT_CHROMIUM, or the first of the usual names on the path."""
    named = os.environ.get(VARIABLE)
    if named:
        return shutil.which(named)
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> str:
    """Try apt-get; what came of it, in words."""
    apt = shutil.which("apt-get")
    if apt is None:
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return f"apt-get needs root; type: sudo apt-get install {PACKAGES[0]}"
    options = ["-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    commands = [[apt, "install", *options, package] for package in PACKAGES]
    said = ""
    # A fresh machine's list of packages is empty: fetch it where the first attempt fails.
    for command in (commands[0], [apt, "update", "-qq"], *commands):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if find():
            return "installed by apt-get"
        said = done.stderr.strip()[-300:] or said
    return f"apt-get could not install {PACKAGES[0]}: {said}"


def main() -> int:
    outcome = "found" if find() else install()
    path = find()
    print(f"Chromium: {path} ({outcome})" if path else f"NO CHROMIUM: {outcome}")
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
