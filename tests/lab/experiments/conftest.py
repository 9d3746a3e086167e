import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """As the server computes: a slider's answer has one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
