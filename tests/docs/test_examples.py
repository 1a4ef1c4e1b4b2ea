"""The examples answer a mistake with one line; test_blocks.py and tests/server run them."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.error_texts import ROOT


@pytest.mark.parametrize(
    ("name", "flag", "value", "says"),
    [
        ("stream.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("batch.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("many_streams.py", "--model", "/no/such", "model must be a directory with a config.json, got /no"),
        # No process listens on port 9.
        ("client.py", "--url", "http://127.0.0.1:9/v1", "Connection error. (--url says where the"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, flag: str, value: str, says: str
) -> None:
    monkeypatch.setattr("sys.argv", [name, flag, value])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    # Python prints it, and then exits with code 1.
    assert str(error.value).startswith(f"error: {says}")
    assert "\n" not in str(error.value)
