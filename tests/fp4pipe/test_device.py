"""Device names that mean nothing, and devices that are not there."""

import pytest
import torch

from fp4pipe.device import pick_device
from fp4pipe.errors import Unavailable, UsageError


def test_names() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="device 'tpu' is unknown"):
        pick_device("tpu")
    with pytest.raises(UsageError, match="device 'mps' is not supported"):
        pick_device("mps")
    with pytest.raises(Unavailable, match="cuda:99 was asked for"):
        pick_device("cuda:99")
