"""Two trainings of the demo's model, shared by all tests: one ill, one well."""

from pathlib import Path

import pytest
import torch

from scaledot.lab import training
from scaledot.lab.training import Size

SIZE = Size(steps=70, batch=8, tokens=64)


@pytest.fixture(scope="session")
def sick_demo(tmp_path_factory) -> Path:
    """The demo's run: a learning rate that attention does not survive."""
    return _trained(tmp_path_factory.mktemp("sick") / "sick.vitals", training.LEARNING_RATE)


@pytest.fixture(scope="session")
def well_demo(tmp_path_factory) -> Path:
    return _trained(tmp_path_factory.mktemp("well") / "well.vitals", 1e-3)


def _trained(path: Path, rate: float) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LEARNING_RATE", rate)
        training.train(0, SIZE, path)
    torch.set_num_threads(threads)
    return path
