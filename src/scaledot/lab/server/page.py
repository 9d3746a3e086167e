"""The built page: its files, read once. What is not among them cannot be asked for."""

import gzip
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


class MissingPage(Exception):
    """There is no built page; the message says how to get one."""


@dataclass(frozen=True)
class PageFile:
    content: bytes
    type: str

    @cached_property
    def gzip(self) -> bytes:
        return gzip.compress(self.content, mtime=0)


def load_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Every file by its path below the folder: `index.html`, `assets/index-1a2b3c.js`, ..."""
    if not (folder / INDEX).is_file():
        raise MissingPage(_how_to_get_it(folder))
    return {
        path.relative_to(folder).as_posix(): PageFile(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in TYPES
    }


def _how_to_get_it(folder: Path) -> str:
    checkout = folder.parents[3]
    if (checkout / "frontend" / "package.json").is_file():
        return f"the page is not built yet; type: make -C {checkout} page"
    return "this installation came without the page; type: pip install --force-reinstall scaledot"
