"""tools/compare_recipes.py compares a checkpoint with its quantised version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from compiled_mtp.cli.quantize import quantize_checkpoint
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tools import compare_recipes


def test_loss_and_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(FP8_FAMILIES)["dense"] | {"fp8_scale": None, "tokenizer": True}
    plain = write_checkpoint(tmp_path / "plain", **options)
    quantize_checkpoint(plain, tmp_path / "fp8")
    (tmp_path / "text.py").write_text("def f(x):\n    return [x, x + 1]\n" * 20)
    monkeypatch.setattr(compare_recipes, "CONTINUATION", 4)
    monkeypatch.setattr(compare_recipes, "PREFIX", 16)
    given = [str(plain), str(tmp_path / "fp8"), "--text", str(tmp_path / "text.py"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["compare_recipes", *given, "--window", "24", "--tokens", "4"])
    compare_recipes.main()
    result = json.loads(capsys.readouterr().out)
    assert result["bf16"]["agreement"] == 1
    assert result["bf16"]["until_difference"] == result["tokens"] == 4
    losses = [result[name]["loss"] for name in ("bf16", "w8a16", "w8a8")]
    assert len(set(losses)) == 3
    assert max(losses) < 1.5 * min(losses)

    monkeypatch.setattr(sys, "argv", ["compare_recipes", *given, "--window", "4000"])
    with pytest.raises(ValueError, match=r"^text must give 250 windows, got 0; give more$"):
        compare_recipes.main()


@pytest.mark.parametrize(("flag", "least"), [("--tokens", compare_recipes.CONTINUATION), ("--windows", 1)])
def test_sizes_of_nothing_are_refused_before_the_engines(
    monkeypatch: pytest.MonkeyPatch, flag: str, least: int
) -> None:
    monkeypatch.setattr(compare_recipes, "start", None)
    monkeypatch.setattr(sys, "argv", ["compare_recipes", "a", "b", flag, str(least - 1)])
    with pytest.raises(ValueError, match=f"^{flag} must be at least {least}, got {least - 1}; raise it$"):
        compare_recipes.main()
