"""compare.py on a folder with tests like torch's: a failure with ours alone must be explained."""

import pathlib
import subprocess
import sys

import pytest
from torch_suite import compare

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "differences.md"

TESTS = """
import torch
from torch.nn.functional import scaled_dot_product_attention
QUERY = torch.randn(2, 5, 8)
class TestTransformers:
    def test_passes(self):
        scaled_dot_product_attention(QUERY, QUERY, QUERY)
    def test_fails_always(self):
        assert not scaled_dot_product_attention(QUERY, QUERY, QUERY).any()
    def test_scaled_dot_product_attention_2D_causal_attn_mask_cpu(self):
        try:
            scaled_dot_product_attention(QUERY, QUERY, QUERY, torch.ones(5, 5) > 0, is_causal=True)
        except RuntimeError:
            return
        raise AssertionError("no error")
"""
MORE = """
    def test_of_the_name(self):
        assert scaled_dot_product_attention.__module__ != "scaledot.functional"
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("more", "status"), [("", 0), (MORE, 1)])
def test_a_failure_with_ours_alone_must_be_explained(tmp_path, more, status):
    (tmp_path / "test_transformers.py").write_text(TESTS + more)
    script = pathlib.Path(compare.__file__)
    ended = subprocess.run(
        [sys.executable, script, tmp_path, "test_transformers.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == status, ended.stderr
    assert f"1 passed, {1 + status} failed with scaledot alone, 1 with and without" in ended.stdout
    assert "causal_attn_mask_cpu: `attn_mask` together with" in ended.stdout
    assert ("TestTransformers::test_of_the_name: NOT EXPLAINED" in ended.stdout) == bool(more)


def test_every_explanation_is_a_line_of_the_page():
    lines = PAGE.read_text().splitlines()
    for begins in compare.EXPLAINED.values():
        assert any(line.startswith(f"| {begins}") for line in lines), begins
