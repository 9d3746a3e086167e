"""The few lines of Python of every lesson run as they stand and print the lesson's numbers."""

import ast
import contextlib
import io
import math
import subprocess
import sys

import pytest

from scaledot.lab.experiments import LESSONS, as_json

OTHER = {
    "flow": {
        "sentence": "the cat, the hat",
        "d_model": 64,
        "heads": 4,
        "rule": "cosine",
        "seed": 3,
    },
    "vectors": {"q": [2, -1, 2, -1], "k": [1, 2, 1, 2.5]},
    "variance": {"d_k": 512, "scaled": True, "samples": 4000, "sigma_q": 0.5, "seed": 7},
    "saturation": {"scores": [7, 3, 0, -2], "divisor": 2.5},
    "jacobian": {"scores": [12, 2, -1], "divisor": 4},
    "gradients": {"d_k": 64, "rule": "cosine", "rows": 512, "n": 8, "seed": 2},
    "divisors": {"d_k": 128, "heads": 12, "n": 32, "seed": 5},
    "heads": {"preset": "gpt3", "seed": 1},
    "scores": {"width": 128, "v_init": "normal", "size": 2.0, "n": 8, "seed": 4},
    "layernorm": {"d": 128, "layernorm": False, "qk_norm": True, "gain": 2.0, "growth": 3.0},
    "overflow": {"size": 100, "dtype": "bfloat16", "subtract_max": True, "divisor": 2},
    "assumption": {"init": "linear", "sigma_q": 2.0, "d_model": 384, "heads": 6, "seed": 9},
    "race": {"d_k": 16, "optimizer": "adam", "rate": 0.003, "steps": 50, "seed": 2},
}
FURTHER = [
    ("flow", {"rule": "dk"}),
    ("gradients", {"rule": "sqrt_dmodel", "d_k": 128}),
    ("overflow", {"dtype": "float32", "size": 1000}),
    ("overflow", {"dtype": "float64", "subtract_max": True}),
    ("overflow", {"dtype": "bfloat16", "size": 3.5}),
    ("assumption", {"init": "mha"}),
    ("assumption", {"init": "gpt2"}),
    ("layernorm", {"qk_norm": True}),
]
DEFAULT = {name: {} for name in LESSONS} | {"race": {"steps": 50}}
CASES = [*DEFAULT.items(), *OTHER.items(), *FURTHER]


@pytest.mark.parametrize(("name", "given"), CASES, ids=lambda value: str(value)[:30])
def test_lines_of_python_print_the_lessons_numbers(name, given):
    lesson = LESSONS[name]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(lesson.python(given), name, "exec"), {"__name__": "copied"})
    lines = printed.getvalue().splitlines()
    assert len(lines) >= 3
    expected = as_json(lesson.run(**lesson.arguments(given)))
    for line in lines:
        path, text = line.split(" ", 1)
        assert_same(value_of(text), found(expected, path), path)


@pytest.mark.slow
def test_lines_run_in_a_fresh_interpreter():
    code = LESSONS["saturation"].python({"divisor": 8})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    weights = next(line for line in done.stdout.splitlines() if line.startswith("weights"))
    assert value_of(weights.split(" ", 1)[1]) == pytest.approx([0.6741, 0.1931, 0.1327], abs=5e-5)


@pytest.mark.parametrize("name", LESSONS)
def test_lines_import_nothing_but_torch_and_scaledot(name):
    tree = ast.parse(LESSONS[name].python())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported <= {"torch", "scaledot", "re", "zlib", "math"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def value_of(text):
    return ast.literal_eval(text.replace("nan", "'nan'").replace("inf", "'inf'"))


def found(data, path):
    for name in path.split("."):
        data = data[int(name)] if isinstance(data, list) else data[name]
    return data


def assert_same(printed, expected, path):
    if isinstance(expected, list):
        assert len(printed) == len(expected), path
        for one, two in zip(printed, expected, strict=True):
            assert_same(one, two, path)
    elif isinstance(expected, str):
        assert printed == expected, path
    else:
        # float32 sums in another order; a training repeats that a few dozen times
        relative = 1e-3 if path.startswith(("curves", "finishes")) else 2e-4
        assert math.isclose(printed, expected, rel_tol=relative, abs_tol=2e-6), path
