"""Write a file so that nobody sees half of it, and nobody can redirect it."""

import contextlib
import os
import secrets
from pathlib import Path

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither this flag nor its problem
BINARY = getattr(os, "O_BINARY", 0)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file when all of it is written; raises OSError and leaves the old one.

    What is written first has a name in the same folder that cannot be guessed, and is created for
    this call alone: in a folder where others may write, a link that waits there is never followed.
    The mode is that of a new file (the umask's); a link at `path` itself is replaced, not followed.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | BINARY
    with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
        try:
            file.write(content)
            file.flush()
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
