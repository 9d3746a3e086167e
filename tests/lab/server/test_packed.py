"""Files go out compressed to whoever can unpack them, and whole to everybody else."""

import gzip
import http.client
import json

import pytest
from served_lab import PORT, TOKEN, serving
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from scaledot.lab import catalogue
from scaledot.lab.experiments import LESSONS
from scaledot.lab.server import app, start
from scaledot.lab.server.packed import takes_gzip
from scaledot.lab.server.page import PageFile, load_page

SCRIPT = "console.log('many words, and the same again');\n" * 200


@pytest.fixture
def page(page_folder):
    (page_folder / "assets/index-1.js").write_text(SCRIPT)
    return load_page(page_folder)


def get(client, path, accepts):
    return client.get(f"/{TOKEN}/{path}", headers={"accept-encoding": accepts})


@pytest.mark.parametrize(
    ("accepts", "packed"),
    [
        ("gzip", True),
        ("gzip, deflate, br, zstd", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("br;q=1.0, *;q=0.1", True),
        ("", False),
        ("br", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, br", False),
        ("*;q=0", False),
        ("*, gzip;q=0", False),
    ],
)
def test_gzip_is_sent_to_those_who_take_it(accepts, packed):
    assert takes_gzip(Headers({"accept-encoding": accepts})) is packed


def test_without_a_wish_nothing_is_compressed():
    assert not takes_gzip(Headers({}))


@pytest.mark.parametrize("path", ["", "assets/index-1.js", "api/catalogue/en"])
def test_both_ways_are_the_same_file(client, path):
    packed, whole = get(client, path, "gzip"), get(client, path, "identity")
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in whole.headers
    assert packed.content == whole.content  # the client has unpacked it
    for answer in (packed, whole):
        assert answer.headers["vary"] == "accept-encoding"
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert packed.headers["content-type"] == whole.headers["content-type"]
    assert int(packed.headers["content-length"]) < len(whole.content) / 2


def test_a_small_file_stays_as_it_is(client):
    answer = get(client, "assets/icon.svg", "gzip")
    assert "content-encoding" not in answer.headers
    assert answer.content.startswith(b"<svg")


def test_what_is_refused_is_refused_before_it_is_compressed(client):
    answer = client.get("/another-token/assets/index-1.js", headers={"accept-encoding": "gzip"})
    assert answer.status_code == 403
    assert "content-encoding" not in answer.headers


def test_the_bytes_of_a_real_server_are_gzip(page):
    with serving(page) as address:
        host, token = address.split("/")
        connection = http.client.HTTPConnection(host)
        connection.request(
            "GET", f"/{token}/assets/index-1.js", headers={"accept-encoding": "gzip"}
        )
        sent = connection.getresponse().read()
        connection.close()
    assert gzip.decompress(sent).decode() == SCRIPT


@pytest.mark.parametrize("lang", ["en", "hi"])
def test_the_document_brings_the_lessons_and_the_words(page, lang):
    made = app.make_app(page, TOKEN, PORT, lang=lang)
    with TestClient(made, base_url=f"http://127.0.0.1:{PORT}") as client:
        text = client.get(f"/{TOKEN}/").text
        listed = client.get(f"/{TOKEN}/api/lessons").json()
    _, found, rest = text.partition('<script type="application/json" id="scaledot-start">')
    assert found
    data = json.loads(rest.partition("</script>")[0])
    assert data == {"lessons": listed, "catalogue": {lang: catalogue.load(lang)}}
    assert [lesson["name"] for lesson in listed["lessons"]] == list(LESSONS)
    assert rest.endswith("</script></body></html>\n")


def test_words_cannot_end_the_element_that_holds_them(monkeypatch):
    monkeypatch.setattr(catalogue, "load", lambda lang: {"evil": "</script><b>"})
    index = PageFile(b"<html><body></body></html>", "text/html")
    text = start.with_start(index, "en", run=False).content.decode()
    assert text.count("</script>") == 1
    assert "<b>" not in text
