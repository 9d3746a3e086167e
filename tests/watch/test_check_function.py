"""`scaledot check module:function`: any model, and what happens when it cannot be read."""

import json
import sys
import textwrap

import pytest
import torch
from torch.nn import functional as F

from scaledot import cli, functional

PREFIX = """
import math
import torch
from torch import nn
from torch.nn import functional as F
import scaledot
"""

# Four heads made by hand over 16 tokens: the previous token, the first token, everything alike,
# and scores that are what sqrt(d_k) promises.
BY_HAND = """
class Four(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        n = 16
        position = torch.eye(n)
        query, key = torch.zeros(1, 4, n, n), torch.zeros(1, 4, n, n)
        query[0, 0], key[0, 0] = 40 * position, position.roll(-1, 0)
        query[0, 1, :, 0], key[0, 1, 0, 0] = 40, 0.4
        query[0, 3], key[0, 3] = torch.randn(2, n, n, generator=generator)
        self.register_buffer("query", query)
        self.register_buffer("key", key)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.query, self.key, self.key)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder, as a user has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(source, name=f"model_of_{tmp_path.name}"):
        (tmp_path / f"{name}.py").write_text(PREFIX + textwrap.dedent(source))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("model_of_"):
            del sys.modules[name]


def _data(capsys, *arguments):
    status = cli.main(["check", *arguments, "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return status, json.loads(printed.out)


def _refused(capsys, *arguments):
    assert cli.main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_heads_made_by_hand_are_recognised(capsys, module):
    name = module(BY_HAND + "def build(): return Four(), torch.zeros(1)")
    status, data = _data(capsys, f"{name}:build")
    previous, sink, flat, plain = data["heads"]
    assert status == 1
    assert data["healthy"] is False
    assert previous["roles"] == ["positional", "saturated"]
    assert previous["offset"]["tokens"] == -1
    assert previous["offset"]["weight"] > 0.99
    # 40 * 0.4 / sqrt(16) = 4 on the first of 16 keys, 0 on the others.
    assert sink["roles"] == ["sink"]
    weight = torch.tensor([4.0] + [0.0] * 15).softmax(0)[0].item()
    assert sink["vitals"]["sink"] == pytest.approx(weight, rel=1e-5)
    assert flat["roles"] == ["flat"]
    assert {"logit_std", "row_std", "entropy_ratio"} <= set(flat["outside"])
    assert plain["roles"] == plain["outside"] == []
    assert plain["scale_holds"] is True
    assert {(head["d_k"], head["divisor"]) for head in data["heads"]} == {(16, 4.0)}


def test_the_table_shows_the_worst_and_the_map_all(capsys, module):
    name = module(BY_HAND + "def build(): return Four(), torch.zeros(1)")
    assert cli.main(["check", f"{name}:build", "--top", "1"]) == 1
    shown = capsys.readouterr().out
    assert "! 2 of 4 heads are outside a healthy band, 1 of them positional or a sink" in shown
    assert "0 Four  P  s  F  ·" in shown
    assert "√d_k = √16 = 4" in shown
    assert "√(2 ln n) = 2.35" in shown
    assert "(1 of 4)" in shown
    assert "previous token" in shown
    assert "--top 4 shows all" in shown


def test_a_healthy_model_ends_with_status_0(capsys, module):
    source = """
    def build():
        torch.manual_seed(0)
        class Unit(nn.Module):
            def forward(self, query):
                return F.scaled_dot_product_attention(query, torch.randn(1, 3, 64, 8), query)
        return Unit(), {"query": torch.randn(1, 3, 64, 8)}
    """
    name = module(source)
    assert cli.main(["check", f"{name}:build"]) == 0
    shown = capsys.readouterr().out
    assert "✓ all 3 heads are inside their healthy bands" in shown
    assert "√d_k is still right for all 3 heads" in shown


def test_torch_encoder_is_seen_on_its_fast_path(capsys, module):
    source = """
    def build():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        return nn.TransformerEncoder(layer, 2), (torch.randn(2, 17, 12),)
    """
    _, data = _data(capsys, f"{module(source)}:build")
    assert data["coverage"]["watched"] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert data["coverage"]["unseen"] == []
    assert data["not_known_whether_positional"] == {}
    assert len(data["heads"]) == 4
    assert all(head["d_k"] == 6 for head in data["heads"])


@pytest.mark.parametrize(("scale", "divisor"), [("sqrt_dk", 2.0), ("none", 1.0), ("dk", 4.0)])
def test_scaledots_own_module_shows_its_divisor(capsys, module, scale, divisor):
    source = f"""
    def build():
        torch.manual_seed(0)
        return scaledot.nn.MultiHeadAttention(12, 3, scale={scale!r}), torch.randn(2, 17, 12)
    """
    _, data = _data(capsys, f"{module(source)}:build")
    assert [head["divisor"] for head in data["heads"]] == [divisor] * 3
    assert all(head["offset"] is not None for head in data["heads"])


def test_a_divisor_that_is_not_the_root_is_named(capsys, module):
    source = """
    def build(): return scaledot.nn.MultiHeadAttention(12, 3, scale="none"), torch.randn(1, 9, 12)
    """
    cli.main(["check", f"{module(source)}:build"])
    assert "the scores are divided by 1, not by √d_k = √4 = 2" in capsys.readouterr().out


def test_layers_of_unequal_width_and_length_are_kept_apart(capsys, module, monkeypatch):
    source = """
    class Two(nn.Module):
        def forward(self, x):
            one = F.scaled_dot_product_attention(x, x, x)
            half = x[..., :31, :4]
            return one, F.scaled_dot_product_attention(half, half, half)
    def build(): return Two(), torch.randn(1, 3, 64, 16, generator=torch.manual_seed(0))
    """
    name = module(source)
    _, data = _data(capsys, f"{name}:build")
    assert [head["layer"] for head in data["heads"]] == ["Two"] * 3 + ["Two#2"] * 3
    reason = "it attends in more than one place"
    assert data["not_known_whether_positional"] == {"Two": reason, "Two#2": reason}
    assert {(head["d_k"], head["divisor"]) for head in data["heads"]} == {(None, None)}
    assert {head["offset"] for head in data["heads"]} == {None}
    monkeypatch.setenv("COLUMNS", "100")
    cli.main(["check", f"{name}:build"])
    shown = capsys.readouterr().out
    assert "√(2 ln n) = 2.62 to 2.88" in shown
    assert "0.1..~2.7" in shown  # the healthy row of a table with both


def test_additive_scores_have_no_offsets_and_it_says_so(capsys, module):
    source = """
    def build():
        return scaledot.nn.MultiHeadAttention(12, 3, score="additive"), torch.randn(1, 9, 12)
    """
    name = module(source)
    cli.main(["check", f"{name}:build"])
    assert "not known whether positional (its score is additive)" in capsys.readouterr().out


UNHOOKED = """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ x
"""


def test_a_layer_that_no_probe_sees_is_named(capsys, module):
    source = """
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.own = nn.MultiheadAttention(8, 2), Own()
        def forward(self, x):
            return self.own(self.seen(x, x, x)[0])
    def build(): return Both(), torch.randn(9, 1, 8)
    """
    name = module(UNHOOKED + textwrap.dedent(source))
    _, data = _data(capsys, f"{name}:build")
    assert data["coverage"]["watched"] == ["seen"]
    assert data["coverage"]["unseen"] == ["own"]
    cli.main(["check", f"{name}:build"])
    assert "1 of 2 attention layers watched; 1 layer uses unhooked matmuls: own" in (
        capsys.readouterr().out
    )


def test_a_model_of_which_nothing_is_seen_is_refused_by_name(capsys, module):
    source = "def build(): return nn.Sequential(Own()), torch.randn(1, 9, 8)"
    said = _refused(capsys, f"{module(UNHOOKED + source)}:build")
    assert "0: these look like attention" in said
    assert "scaled_dot_product_attention" in said


def test_a_model_without_attention_is_refused(capsys, module):
    said = _refused(
        capsys, f"{module('def build(): return nn.Linear(2, 2), torch.ones(1, 2)')}:build"
    )
    assert "called no attention that scaledot knows" in said


def test_weights_that_are_nan_are_shown_as_broken(capsys, module):
    source = """
    def build():
        model = nn.MultiheadAttention(8, 2)
        model.in_proj_weight.data[0] = math.nan
        return model, [torch.randn(9, 1, 8)] * 3
    """
    name = module(source)
    status, data = _data(capsys, f"{name}:build")
    assert status == 1
    assert data["heads"][0]["roles"][0] == "broken"
    assert "nonfinite" in data["heads"][0]["outside"]
    assert data["heads"][0]["vitals"]["max_logit"] is None
    assert "nonfinite" not in data["heads"][1]["outside"]
    assert cli.main(["check", f"{name}:build"]) == 1
    assert "9 rows with NaN or infinity" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(capsys, module, fails):
    inputs = "torch.zeros(1)" if not fails else "()"
    name = module(BY_HAND + f"def build(): return Four(), {inputs}")
    before = F.scaled_dot_product_attention, functional._with_vitals, functional.attention
    assert cli.main(["check", f"{name}:build"]) == (2 if fails else 1)
    assert before == (F.scaled_dot_product_attention, functional._with_vitals, functional.attention)
    said = capsys.readouterr().err
    assert ("the forward pass of Four failed" in said) is fails


@pytest.mark.parametrize(
    ("source", "function", "said"),
    [
        ("x = 1", "build", "has no build; write one that returns a model"),
        ("build = 3", "build", "is no function"),
        ("def build(): return 3", "build", "returned a int; it must return two things"),
        ("def build(): return 3, 4", "build", "returned (int, int)"),
        ("def build():\n    return 1 / 0  # oops", "build", "failed: ZeroDivisionError"),
        ("import nowhere_to_be_found", "build", "No module named 'nowhere_to_be_found'"),
        ("1 / 0", "build", "failed: ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_words(capsys, module, source, function, said):
    printed = _refused(capsys, f"{module(source)}:{function}")
    assert said in printed
    assert ("# oops" in printed) == ("# oops" in source)  # the user's own line


def test_an_unknown_module_is_named(capsys, module):
    assert "there is no module model_of_nobody" in _refused(capsys, "model_of_nobody:build")


def test_text_is_for_folders(capsys, module):
    name = module(BY_HAND + "def build(): return Four(), torch.zeros(1)")
    said = _refused(capsys, f"{name}:build", "--text", "x.txt")
    assert "brings its own inputs: leave --text out" in said


@pytest.mark.parametrize("top", ["-1", "x", "1.5"])
def test_a_number_of_heads_that_is_none_is_refused(capsys, top):
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "m:f", f"--top={top}"])
    assert ended.value.code == 2
    assert "is no number of heads" in capsys.readouterr().err


def test_a_module_that_reads_the_command_line_is_asked_for_a_guard(module, capsys):
    name = module("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert cli.main(["check", f"{name}:build"]) == 2
    assert f"{name} has no build" in capsys.readouterr().err
    other = module("raise SystemExit(3)\n", f"{name}_other")
    assert cli.main(["check", f"{other}:build"]) == 2
    assert "if __name__ == '__main__'" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["0", "None", "'done'"])
def test_a_function_that_ends_the_program_is_no_healthy_model(module, capsys, code):
    name = module(f"import sys\ndef build(): sys.exit({code})\n")
    said = _refused(capsys, f"{name}:build")
    assert f"ended the program with {code}" in said


def test_a_forward_pass_that_ends_the_program_is_no_healthy_model(module, capsys):
    text = "class Ends(nn.Module):\n    def forward(self, x): raise SystemExit(0)\n"
    name = module("from torch import nn\n" + text + "def build(): return Ends(), 1\n")
    assert "the forward pass of Ends failed" in _refused(capsys, f"{name}:build")


MOSTLY_BY_HAND = """
class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q_proj(x) * 2, self.k_proj(x) * 2, self.v_proj(x)
        if self.fused:
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v

def build():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(True), *(Attention(False) for _ in range(LAYERS)))
    return model, torch.randn(2, 16, 8)
"""


@pytest.mark.parametrize(("layers", "status"), [(1, 0), (2, 1)])
def test_a_model_of_which_less_than_half_was_seen_is_not_healthy(capsys, module, layers, status):
    name = module(MOSTLY_BY_HAND.replace("LAYERS", str(layers)))
    assert cli.main(["check", f"{name}:build"]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert ("too little seen: 1 of 3 attention layers watched" in printed) is bool(status)
    again, data = _data(capsys, f"{name}:build")
    assert (again, data["healthy"]) == (status, not status)
