"""What tests on the real llama-server need: the program (built if there is none) and the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import llama_server, models
from scripts.tiny_models import Kind


@pytest.fixture(scope="session")
def llama_server_binary() -> Path:
    return llama_server.find_or_build()


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    return models.tiny(Kind.LLAMA)


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    return models.tiny(Kind.GEMMA3)


@pytest.fixture(scope="session")
def tiny_mamba() -> Path:
    return models.tiny(Kind.MAMBA)


@pytest.fixture(scope="session")
def tiny_lfm2() -> Path:
    return models.tiny(Kind.LFM2)


@pytest.fixture(scope="session")
def chat_model() -> Path:
    return models.chat_model()


@pytest.fixture(scope="session")
def window_model() -> Path:
    return models.window_model()
