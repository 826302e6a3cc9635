"""A piece cache of its own for every test session."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4PIPE_CACHE", str(tmp_path_factory.mktemp("fp4pipe-cache")))
        yield
