import pytest
import torch

from ..verification.conftest import process_settings  # noqa: F401


@pytest.fixture
def one_thread():
    """For tiny networks, where more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
