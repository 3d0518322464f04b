"""Applies to every test: a clean environment, and no blocking call inside kvproxy's coroutines."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx

pytest_plugins = ["tests.support.fixtures"]

# Before anything is imported or started: a developer's own settings must not decide a test.
for _name in [name for name in os.environ if name.startswith("KVPROXY_") and "_TEST_" not in name]:
    del os.environ[_name]


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """A blocking call under a kvproxy frame on the event loop's thread raises BlockingError."""
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    with blockbuster_ctx("kvproxy"):
        yield
