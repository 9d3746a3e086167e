from collections.abc import Iterator
from pathlib import Path

import pytest
from served_lab import ORIGIN, PORT, TOKEN, write_page
from starlette.testclient import TestClient

from scaledot.lab.server.app import make_app
from scaledot.lab.server.page import PageFile, load_page


@pytest.fixture
def page_folder(tmp_path: Path) -> Path:
    return write_page(tmp_path / "page")


@pytest.fixture
def page(page_folder: Path) -> dict[str, PageFile]:
    return load_page(page_folder)


@pytest.fixture
def client(page: dict[str, PageFile]) -> Iterator[TestClient]:
    with TestClient(
        make_app(page, TOKEN, PORT), base_url=ORIGIN, raise_server_exceptions=False
    ) as client:
        yield client
