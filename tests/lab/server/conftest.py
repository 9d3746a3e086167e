from collections.abc import Iterator
from pathlib import Path

import pytest
from served_lab import INDEX, ORIGIN, PORT, SCRIPT, TOKEN
from starlette.testclient import TestClient

from scaledot.lab.server.app import make_app
from scaledot.lab.server.page import PageFile, load_page


@pytest.fixture
def page_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text(INDEX)
    (folder / "assets/index-1.js").write_text(SCRIPT)
    (folder / "assets/index-1.css").write_text("body { color: navy }\n")
    (folder / "assets/icon.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "sources.sha256").write_text("0\n")
    return folder


@pytest.fixture
def page(page_folder: Path) -> dict[str, PageFile]:
    return load_page(page_folder)


@pytest.fixture
def client(page: dict[str, PageFile]) -> Iterator[TestClient]:
    with TestClient(
        make_app(page, TOKEN, PORT), base_url=ORIGIN, raise_server_exceptions=False
    ) as client:
        yield client
