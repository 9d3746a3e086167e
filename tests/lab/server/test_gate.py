"""Who is let in: our own page, and nobody else."""

import pytest
from served_lab import ORIGIN, PORT, TOKEN, connect
from starlette.websockets import WebSocketDisconnect

LONG_AGO = "../../../../../../etc/passwd"


def test_the_page_is_served_with_its_token(client):
    answer = client.get(f"/{TOKEN}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "Stub" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_every_name_of_the_loopback_address_is_ours(client, host):
    assert client.get(f"/{TOKEN}/", headers={"host": f"{host}:{PORT}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        f"evil.example:{PORT}",
        "127.0.0.1",
        f"127.0.0.1:{PORT + 1}",
        f"127.0.0.1.evil.example:{PORT}",
        f"localhost:{PORT}.evil.example",
        f"user@127.0.0.1:{PORT}",
        "",
    ],
)
def test_a_foreign_host_is_refused(client, host):
    answer = client.get(f"/{TOKEN}/", headers={"host": host})
    assert answer.status_code == 421
    assert "Stub" not in answer.text


@pytest.mark.parametrize(
    "origin", ["http://evil.example", f"https://127.0.0.1:{PORT}", "http://127.0.0.1", "null", ""]
)
def test_a_foreign_origin_is_refused(client, origin):
    assert client.get(f"/{TOKEN}/api/lessons", headers={"origin": origin}).status_code == 403
    with pytest.raises(WebSocketDisconnect), connect(client, "/api/ask", origin=origin):
        pass


def test_two_origins_are_refused(client):
    headers = [("origin", ORIGIN), ("origin", "http://evil.example")]
    assert client.get(f"/{TOKEN}/", headers=headers).status_code == 403


def test_our_own_origin_is_let_in(client):
    assert client.get(f"/{TOKEN}/", headers={"origin": ORIGIN}).status_code == 200


def test_a_socket_without_an_origin_is_refused(client):
    with pytest.raises(WebSocketDisconnect), connect(client, "/api/ask", origin=None):
        pass


@pytest.mark.parametrize(
    "path", ["/", "", "/wrong/", "/api/lessons", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/"]
)
def test_a_missing_or_wrong_token_is_refused(client, path):
    answer = client.get(path)
    assert answer.status_code == 403
    assert TOKEN not in answer.text


@pytest.mark.parametrize("token", ["wrong", "", "ü"])
def test_a_socket_with_a_wrong_token_is_refused(client, token):
    with pytest.raises(WebSocketDisconnect), connect(client, "/api/ask", token=token):
        pass


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_sent_by_http(client, method):
    assert client.request(method, f"/{TOKEN}/api/lessons").status_code == 405


def test_a_get_with_a_body_is_refused(client):
    assert client.request("GET", f"/{TOKEN}/", content=b"x" * 10).status_code == 413


def test_no_other_page_may_read_or_frame_an_answer(client):
    for path in (f"/{TOKEN}/", f"/{TOKEN}/api/lessons", f"/{TOKEN}/missing", "/wrong/"):
        headers = client.get(path).headers
        assert not [name for name in headers if name.startswith("access-control-")]
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        LONG_AGO,
        f"assets/{LONG_AGO}",
        LONG_AGO.replace("/", "%2f"),
        LONG_AGO.replace("..", "%2e%2e"),
        LONG_AGO.replace("..", "%252e%252e"),
        LONG_AGO.replace("/", "\\"),
        "/etc/passwd",
        "//etc/passwd",
        "%00index.html",
        "assets/../../answers.py",
        "sources.sha256",
    ],
)
def test_only_files_of_the_page_are_served(client, path):
    answer = client.get(f"/{TOKEN}/{path}")
    assert answer.status_code in (403, 404)
    assert "root:" not in answer.text
    assert "Traceback" not in answer.text


def test_an_address_without_its_last_slash_leads_to_the_page(client):
    answer = client.get(f"/{TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, f"{ORIGIN}/{TOKEN}/")
