"""Whatever happens to the disk, the training goes on as if nothing were there, with one warning."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
import torch
from watch.store_cases import files_no_larger_than, unprivileged, warnings_in
from watched_models import TinyGPT

import scaledot
from scaledot.watch.store import RunReader, writer

STEPS = 12


def losses(path: Path | None, before_step=lambda step: None) -> list[float]:
    torch.manual_seed(3)
    model = TinyGPT()
    tokens = torch.randint(0, 11, (2, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    watched = contextlib.nullcontext() if path is None else scaledot.Watch(model, 1, store=path)
    with watched as watch:
        for step in range(STEPS):
            before_step(step)
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if watch is not None:
                watch._own_store.flush()  # so that the disk's answer is here before the next step
    return found


@pytest.fixture(autouse=True)
def fast_retry(monkeypatch):
    monkeypatch.setattr(writer, "RETRY", 0.05)


def test_full_disk(tmp_path, caplog):
    path = tmp_path / "run.vitals"
    with contextlib.ExitStack() as stack:

        def fill(step: int) -> None:
            if step == 5:
                stack.enter_context(files_no_larger_than(4096))

        assert losses(path, fill) == losses(None)
    assert [step.step for step in RunReader(path).steps()] == list(range(5))
    (warning,) = warnings_in(caplog)
    assert "The training goes on" in warning


def test_store_that_is_deleted_under_it(tmp_path, caplog):
    path = tmp_path / "run.vitals"

    def delete(step: int) -> None:
        if step == 5:
            path.unlink()

    assert losses(path, delete) == losses(None)
    (warning,) = warnings_in(caplog)
    assert "deleted or replaced" in warning
    assert not path.exists()


def test_read_only_folder(tmp_path, caplog):
    expected = losses(tmp_path / "run.vitals")  # imports what an unprivileged user might not read
    with tempfile.TemporaryDirectory(prefix="scaledot-test-") as name:
        os.chmod(name, 0o555)
        with unprivileged():
            assert losses(Path(name) / "run.vitals") == expected
        assert os.listdir(name) == []
    (warning,) = warnings_in(caplog)
    assert "The training goes on" in warning
