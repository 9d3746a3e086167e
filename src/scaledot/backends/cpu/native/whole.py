"""Whether a shared library is all there.

An installation that was killed, or a full disk, leaves the beginning of a file. The system's loader
maps such a file as if it were whole, and the process dies of SIGBUS at the first page that is not
there. No exception tells of it, so the file is looked at before it is loaded.
"""

import pathlib
import struct

MAGIC = b"\x7fELF"
WIDE_LITTLE_ENDIAN = b"\x02\x01"  # 64 bits, as on x86-64 and AArch64
HEADER = struct.Struct("<40xQ10xHH2x")  # of the table of sections: where, size of one, how many


def is_whole(path: pathlib.Path) -> bool:
    """The linker writes the table of sections last; its end is the end of the file."""
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        return False
    if start[4:6] != WIDE_LITTLE_ENDIAN:
        return True  # another kind of machine: not ours to judge
    offset, size, number = HEADER.unpack(start)
    return offset > 0 and path.stat().st_size >= offset + size * number
