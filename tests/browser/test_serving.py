"""The page in a real browser, as far as the server answers for it."""

import json
import re

import pytest

from scaledot.lab.experiments import LESSONS


def test_the_page_opens_without_an_error_or_a_request_off_loopback(page, lab):
    page.goto(lab)
    page.wait_for_selector("main, h1")
    assert page.title()


def test_a_socket_of_the_page_is_let_in_by_its_own_policy(page, lab):
    page.goto(lab)
    answer = page.evaluate(
        """() => new Promise((done, fail) => {
            const url = new URL("./api/ask", location.href);
            url.protocol = "ws:";
            const socket = new WebSocket(url);
            socket.onerror = fail;
            socket.onopen = () => socket.send(JSON.stringify({sequence: 1, lesson: "saturation"}));
            socket.onmessage = (message) => { done(message.data); socket.close(); };
        })"""
    )
    expected = LESSONS["saturation"].run(**LESSONS["saturation"].arguments())
    assert json.loads(answer)["result"]["top"] == pytest.approx(expected.top, rel=1e-12)


def test_another_page_can_neither_read_nor_ask(new_page, lab, lab_of, tmp_path):
    """Another lab stands for the other page: same machine, other port."""
    page = new_page()
    page.goto(lab_of(tmp_path / "later.vitals"))
    found = page.evaluate(
        """async (url) => {
            const read = await fetch(url + "api/lessons").then(() => "read", () => "refused");
            const asked = await new Promise((done) => {
                let socket;
                try { socket = new WebSocket(url.replace("http", "ws") + "api/ask"); }
                catch { return done("refused"); }
                socket.onopen = () => done("open");
                socket.onerror = () => done("refused");
            });
            return [read, asked];
        }""",
        lab,
    )
    assert found == ["refused", "refused"]
    assert len(new_page.problems) >= 2  # the browser tells of both on the console
    new_page.problems.clear()


def test_an_exported_page_opens_from_the_disk(new_page, exported):
    page = new_page()
    page.goto(exported.as_uri())
    page.wait_for_selector("main, h1")
    assert re.search(r"d_k|attention|softmax", page.inner_text("body"), re.IGNORECASE)


def test_the_monitor_shows_a_run_that_is_written(page, lab_of, monitored_run):
    last = monitored_run.write(5)
    page.goto(lab_of(monitored_run.path))
    frames = page.evaluate(
        """() => new Promise((done, fail) => {
            const url = new URL("./api/monitor", location.href);
            url.protocol = "ws:";
            const socket = new WebSocket(url);
            socket.binaryType = "arraybuffer";
            socket.onerror = fail;
            let header = null;
            socket.onmessage = ({data}) => {
                if (typeof data === "string") { header ??= JSON.parse(data); return; }
                const [field, start, rows, columns] = new Int32Array(data, 0, 4);
                const steps = [...new Int32Array(data, 16, rows)];
                const numbers = new Float32Array(data, 16 + 4 * rows, rows * columns);
                done({header, start, steps, columns, last: [...numbers.slice(-columns)]});
                socket.close();
            };
        })"""
    )
    assert frames["steps"] == list(range(last + 1))
    field = frames["header"]["field"]
    for column, number in zip(frames["header"]["columns"], frames["last"], strict=True):
        expected = monitored_run.value(column["layer"], column["head"], field)
        assert number == pytest.approx(expected, rel=1e-6)
