from types import SimpleNamespace

import pytest

from scaledot.lab import demo
from scaledot.lab.experiments import story


@pytest.fixture(scope="session")
def lessons() -> SimpleNamespace:
    """Every lesson at seed 0, measured once, as the demo does: in one thread."""
    with demo._one_thread():
        return SimpleNamespace(**{lesson.__name__: lesson(0) for lesson in story.LESSONS})
