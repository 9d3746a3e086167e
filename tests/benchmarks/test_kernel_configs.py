"""Which kernels the search for a configuration compares; it measures on a GPU only."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks/kernels").exists(), reason="benchmarks are not part of this copy"
)
launch = pytest.importorskip("scaledot.backends.cuda.hopper.launch")


@pytest.fixture
def configs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.kernels import configs

    return configs


def test_what_is_chosen_runs_against_others_that_sum_the_same(configs):
    for kind in configs.kinds():
        found = [launch.Config(*fields) for fields in configs.candidates(kind)]
        assert len(set(found)) == len(found) >= 10
        for config in found:
            assert (config.keys, config.consumers) == (found[0].keys, found[0].consumers)
            assert sorted(config.order) == sorted("lwptab")
            assert kind.values or not config.early


def test_kinds_are_those_of_the_bench(configs):
    names = [str(kind) for kind in configs.kinds()]
    assert len(set(names)) == 24
    assert "128 4096 causal" in names
    assert "64 16384 full scores alone" in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so(configs, capsys):
    assert configs.main([]) == 2
    assert "no GPU" in capsys.readouterr().out
