"""Questions over the socket: what is answered, what is refused, and that the latest value wins."""

import json
import threading

import pytest
from served_lab import LARGEST_MESSAGE, connect
from starlette.websockets import WebSocketDisconnect

from scaledot.lab.experiments import LESSONS, as_json
from scaledot.lab.experiments.lesson import Control, Lesson
from scaledot.lab.server import answers


def ask(socket, message) -> dict:
    socket.send_text(message if isinstance(message, str) else json.dumps(message))
    return json.loads(socket.receive_text())


@pytest.fixture
def socket(client):
    with connect(client, "/api/ask") as socket:
        yield socket


def fake(name: str, run, monkeypatch) -> None:
    controls = (Control("x", "range", 0, low=0, high=1000, step=1),)
    monkeypatch.setitem(LESSONS, name, Lesson(name, run, controls, lambda x: f"print({x})"))


@pytest.mark.parametrize("name", [name for name in LESSONS if name != answers.RACE])
def test_an_answer_is_what_the_library_computes(socket, name):
    lesson = LESSONS[name]
    arguments = lesson.arguments({})
    found = ask(socket, {"sequence": 7, "lesson": name, "arguments": {}})
    assert found == {
        "sequence": 7,
        "lesson": name,
        "arguments": as_json(arguments),
        "result": as_json(lesson.run(**arguments)),
        "python": lesson.python(arguments),
    }


def test_arguments_are_used_and_completed(socket):
    message = {"sequence": 1, "lesson": "variance", "arguments": {"d_k": 512, "seed": 3}}
    found = ask(socket, message)
    arguments = LESSONS["variance"].arguments({"d_k": 512, "seed": 3})
    assert found["arguments"] == as_json(arguments)
    assert found["result"] == as_json(LESSONS["variance"].run(**arguments))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "no object"),
        ("7", "no object"),
        ("[" * 60000, "not JSON"),
        ('{"sequence": NaN}', "not JSON"),
        ({}, "sequence"),
        ({"sequence": "1", "lesson": "variance"}, "sequence"),
        ({"sequence": True, "lesson": "variance"}, "sequence"),
        ({"sequence": 1.5, "lesson": "variance"}, "sequence"),
        ({"sequence": -1, "lesson": "variance"}, "sequence"),
        ({"sequence": 2**53, "lesson": "variance"}, "sequence"),
        ({"sequence": 1}, "expected"),
        ({"sequence": 1, "stop": 1}, "expected"),
        ({"sequence": 1, "lesson": "variance", "more": 1}, "expected"),
        ({"sequence": 1, "lesson": "gravity"}, "there is no lesson 'gravity'; there are flow"),
        ({"sequence": 1, "lesson": ["variance"]}, "there is no lesson"),
        ({"sequence": 1, "lesson": "__class__"}, "there is no lesson"),
        ({"sequence": 1, "lesson": "variance", "arguments": []}, "expected names with values"),
        ({"sequence": 1, "lesson": "variance", "arguments": {"dk": 64}}, "no argument dk"),
        ({"sequence": 1, "lesson": "variance", "arguments": {"d_k": "64"}}, "d_k must be"),
        ({"sequence": 1, "lesson": "variance", "arguments": {"d_k": 10**9}}, "d_k must be"),
        ({"sequence": 1, "lesson": "variance", "arguments": {"d_k": None}}, "d_k must be"),
        ({"sequence": 1, "lesson": "vectors", "arguments": {"q": [1] * 10000}}, "q must be"),
        ({"sequence": 1, "race": {"rate": "fast"}}, "rate must be"),
        ({"sequence": 1, "race": 5}, "expected names with values"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_wrong_message_is_refused_in_one_line_and_the_next_is_answered(socket, message, said):
    found = ask(socket, message)
    assert set(found) == {"sequence", "error"}
    assert said in found["error"]
    assert "Traceback" not in found["error"]
    assert len(found["error"]) < 500
    assert "result" in ask(socket, {"sequence": 2, "lesson": "saturation"})


def test_a_binary_message_is_refused(socket):
    socket.send_bytes(b"\x00\x01")
    assert "binary" in json.loads(socket.receive_text())["error"]


def test_a_message_that_is_too_big_ends_the_conversation(socket):
    socket.send_text(json.dumps({"sequence": 1, "lesson": "x" * LARGEST_MESSAGE}))
    with pytest.raises(WebSocketDisconnect) as ended:
        socket.receive_text()
    assert ended.value.code == 1009


def test_a_bug_of_ours_is_named_but_not_shown(socket, monkeypatch, caplog):
    def run(x):
        raise KeyError("a secret of the inside")

    fake("broken", run, monkeypatch)
    found = ask(socket, {"sequence": 1, "lesson": "broken"})
    assert "the lesson failed" in found["error"]
    assert "secret" not in found["error"]
    assert "a secret of the inside" in caplog.text
    assert "result" in ask(socket, {"sequence": 2, "lesson": "saturation"})


def test_the_latest_value_of_a_lesson_wins(client, monkeypatch):
    """Twenty questions come while the first is computed: of those only the last is answered."""
    begun, release, ran = threading.Event(), threading.Event(), []

    def slow(x):
        ran.append(x)
        if x == 0:
            begun.set()
            assert release.wait(20)
        return {"x": x}

    fake("slow", slow, monkeypatch)
    with connect(client, "/api/ask") as socket:
        socket.send_json({"sequence": 0, "lesson": "slow"})
        assert begun.wait(20)
        for x in range(1, 21):
            socket.send_json({"sequence": x, "lesson": "slow", "arguments": {"x": x}})
        # Answered at once, without the worker: when it comes, all of the above have been read.
        socket.send_json({"sequence": 99})
        assert "error" in socket.receive_json()
        release.set()
        answered = [socket.receive_json()["sequence"] for _ in range(2)]
        socket.send_json({"sequence": 100, "lesson": "slow", "arguments": {"x": 100}})
        assert socket.receive_json()["sequence"] == 100
    assert answered == [0, 20]
    assert ran == [0, 20, 100]


def test_lessons_do_not_take_each_others_place(client, monkeypatch):
    begun, release = threading.Event(), threading.Event()

    def slow(x):
        begun.set()
        assert release.wait(20)
        return {}

    fake("slow", slow, monkeypatch)
    with connect(client, "/api/ask") as socket:
        socket.send_json({"sequence": 0, "lesson": "slow"})
        assert begun.wait(20)
        socket.send_json({"sequence": 1, "lesson": "vectors"})
        socket.send_json({"sequence": 2, "lesson": "saturation"})
        socket.send_json({"sequence": 3, "lesson": "vectors"})
        socket.send_json({"sequence": 99})
        assert "error" in socket.receive_json()
        release.set()
        answered = [socket.receive_json()["sequence"] for _ in range(3)]
    assert sorted(answered) == [0, 2, 3]


def test_lessons_run_in_a_thread_with_one_core(client, monkeypatch):
    import torch

    found = []

    def run(x):
        found.append((threading.current_thread().name, torch.get_num_threads()))
        return {}

    fake("where", run, monkeypatch)
    with connect(client, "/api/ask") as socket:
        ask(socket, {"sequence": 1, "lesson": "where"})
    assert found[0][0].startswith("scaledot-lessons")
    assert found[0][1] == 1


@pytest.fixture
def steps(monkeypatch):
    """A race whose steps are counted."""
    made: list[int] = []

    def race_steps(**arguments):
        for step in range(arguments["steps"]):
            made.append(step)
            yield {"step": step}

    monkeypatch.setattr(answers, "race_steps", race_steps)
    return made


def test_a_race_comes_step_by_step(socket, steps):
    found = ask(socket, {"sequence": 4, "race": {"steps": 50}})
    assert found["arguments"] == as_json(LESSONS["race"].arguments({"steps": 50}))
    for step in range(50):
        assert socket.receive_json() == {"sequence": 4, "step": {"step": step}}
    assert socket.receive_json() == {"sequence": 4, "done": True}


def test_a_race_is_the_one_of_the_library(socket):
    from scaledot.lab.experiments import race_steps

    arguments = LESSONS["race"].arguments({"steps": 50, "d_k": 16})
    expected = [as_json(step) for step, _ in zip(race_steps(**arguments), range(3), strict=False)]
    ask(socket, {"sequence": 4, "race": {"steps": 50, "d_k": 16}})
    assert [socket.receive_json()["step"] for _ in range(3)] == expected


def test_a_race_stops_when_it_is_told_to(client, monkeypatch):
    released, made = threading.Semaphore(0), []

    def race_steps(**arguments):
        for step in range(arguments["steps"]):
            assert released.acquire(timeout=60)
            made.append(step)
            yield {"step": step}

    monkeypatch.setattr(answers, "race_steps", race_steps)
    with connect(client, "/api/ask") as socket:
        ask(socket, {"sequence": 4, "race": {}})
        released.release()
        assert socket.receive_json()["step"] == {"step": 0}
        socket.send_json({"sequence": 5, "stop": True})
        socket.send_json({"sequence": 99})
        assert "error" in socket.receive_json()  # the stop has been read
        released.release(200)
        left = [socket.receive_json()]
        while "done" not in left[-1]:
            left.append(socket.receive_json())
        assert left[-1] == {"sequence": 4, "done": True}
    assert len(made) <= 2  # the step that was on its way


def test_a_new_race_stops_the_one_before(client, monkeypatch):
    released = threading.Semaphore(0)

    def race_steps(**arguments):
        for step in range(arguments["steps"]):
            assert released.acquire(timeout=60)
            yield {"step": step, "seed": arguments["seed"]}

    monkeypatch.setattr(answers, "race_steps", race_steps)
    with connect(client, "/api/ask") as socket:
        ask(socket, {"sequence": 1, "race": {"seed": 1}})
        socket.send_json({"sequence": 2, "race": {"seed": 2, "steps": 50}})
        socket.send_json({"sequence": 99})
        found = []
        while not any("error" in one for one in found):
            found.append(socket.receive_json())
        released.release(400)
        while {"sequence": 2, "done": True} not in found:
            found.append(socket.receive_json())
    assert {"sequence": 1, "done": True} in found
    assert sum(one["sequence"] == 1 for one in found if "step" in one) <= 1
    assert sum(one["sequence"] == 2 for one in found if "step" in one) == 50


def test_questions_are_answered_between_the_steps_of_a_race(socket, steps):
    ask(socket, {"sequence": 1, "race": {"steps": 200}})
    socket.send_json({"sequence": 2, "lesson": "saturation"})
    found = []
    while {"sequence": 1, "done": True} not in found:
        found.append(socket.receive_json())
    (answer,) = [place for place, one in enumerate(found) if one["sequence"] == 2]
    assert answer < len(found) - 1


def test_a_page_that_is_closed_ends_its_race(client, monkeypatch):
    made = []
    ended = threading.Event()

    def race_steps(**arguments):
        try:
            for step in range(10**9):
                made.append(step)
                yield {"step": step}
        finally:
            ended.set()

    monkeypatch.setattr(answers, "race_steps", race_steps)
    with connect(client, "/api/ask") as socket:
        ask(socket, {"sequence": 1, "race": {}})
        socket.receive_json()
    number = None
    for _ in range(100):  # it has stopped when nothing is added any more
        before, number = number, len(made)
        if before == number:
            break
        ended.wait(0.05)
    assert before == number
