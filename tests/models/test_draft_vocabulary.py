"""The draft vocabulary: files of ids and their errors, the tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiled_mtp import EngineConfig
from compiled_mtp.cli.main import main
from compiled_mtp.models import draft_vocabulary
from compiled_mtp.models.draft_vocabulary import choose_draft_ids


def written(folder: Path, text: str) -> Path:
    path = folder / "ids"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["7\n3\n90\n", " 7\r\n\n3 \n90", "[7, 3,\n 90]"])
def test_a_file_holds_one_id_per_line_or_a_list(tmp_path: Path, text: str) -> None:
    assert choose_draft_ids(written(tmp_path, text), 100, (50, 3, 200)) == (3, 7, 50, 90)


def test_a_number_is_that_many_lowest_ids() -> None:
    assert choose_draft_ids(3, 100, (50,)) == (0, 1, 2, 50)
    assert choose_draft_ids(None, 100, (50,)) is None
    assert choose_draft_ids(100, 100, (50,)) is None
    assert choose_draft_ids(99, 100, (99,)) is None
    with pytest.raises(
        ValueError, match=r"^draft_vocab must be at most 100, the ids of this checkpoint, got 101; leave"
    ):
        choose_draft_ids(101, 100, (50,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "draft_vocab must name at least one id, got an empty file; make one with `compiled-mtp",
        ),
        ("[]", "draft_vocab must name at least one id"),
        ("1\n2\n1\n", "draft_vocab must name every id once, got 1 twice; drop one from "),
        ("1\n100\n", "draft_vocab must name ids in 0..99 only, got 100; drop it from "),
        ("-1", "draft_vocab must name ids in 0..99 only, got -1"),
        ("1.5", "draft_vocab must name ids in 0..99 only, got 1.5"),
        ("[true]", "draft_vocab must name ids in 0..99 only, got True"),
        ("[[1]]", "draft_vocab must name ids in 0..99 only, got [1]"),
        ("one\ntwo", "draft_vocab must name a file with one id per line or a JSON list of ids, got "),
        ("[1, 2", "draft_vocab must name a file with one id per line or a JSON list of ids, got "),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        choose_draft_ids(written(tmp_path, text), 100, ())
    assert str(raised.value).startswith(message)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, Path("a\0b")):
        with pytest.raises(ValueError, match="draft_vocab must be a number of ids or a readable file of ids"):
            choose_draft_ids(path, 100, ())


def test_config_takes_numbers_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig(draft_vocab="12").draft_vocab == 12  # type: ignore[arg-type]
    assert EngineConfig(draft_vocab="a/ids.txt").draft_vocab == Path("a/ids.txt")  # type: ignore[arg-type]
    monkeypatch.setenv("COMPILED_MTP_DRAFT_VOCAB", "~/ids.txt")
    assert EngineConfig().draft_vocab == Path.home() / "ids.txt"
    assert EngineConfig(draft_vocab=Path("~/ids.txt")).draft_vocab == Path.home() / "ids.txt"
    with pytest.raises(
        ValueError, match="draft_vocab must be a number of ids, at least 1, or a file of ids, got '-3'"
    ):
        EngineConfig(draft_vocab="-3")  # type: ignore[arg-type]


def test_the_command_ranks_by_frequency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("for i in range(3):\n    print(i)\n" * 20, encoding="utf-8")
    (tmp_path / "b.md").write_text("not counted", encoding="utf-8")
    (tmp_path / "c.txt").mkdir()
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    output = tmp_path / "ids"
    assert main(["rank-vocabulary", str(tmp_path), "--top", "5", "--output", str(output)]) == 0
    told = json.loads(capsys.readouterr().out)
    ids = choose_draft_ids(output, 4097, ())
    assert ids is not None
    assert len(ids) == 5
    assert told["ids"] == 5
    assert 0.3 < told["coverage"] < 1.0
    assert main(["rank-vocabulary", str(tmp_path), "--suffix", ".rst", "--output", str(output)]) == 2
    assert "error: paths must hold text, got none in 1 paths;" in capsys.readouterr().err
    output.unlink()
    assert main(["rank-vocabulary", str(tmp_path), "--output", str(output)]) == 0
    output.unlink()
    refused = {
        "top must be at least 1, got 0": [str(tmp_path), "--top=0"],
        f"model must be a GGUF file or a directory, got {tmp_path}/typo": [
            str(tmp_path),
            f"--model={tmp_path}/typo",
        ],
        "paths must exist, got no": ["no"],
        f"output must be a file in a directory that exists, got {tmp_path}": [
            str(tmp_path),
            f"--output={tmp_path}",
        ],
        "output must be a file in a directory that exists, got no/ids": [str(tmp_path), "--output=no/ids"],
    }
    for said, given in refused.items():
        assert main(["rank-vocabulary", "--output", str(output), *given]) == 2
        assert f"error: {said}; " in capsys.readouterr().err
    assert not output.exists()


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "_MOST_CHARACTERS", 8, raising=False)
    assert choose_draft_ids(written(tmp_path, "7\n3\n9\n1\n"), 100, ()) == (1, 3, 7, 9)
    with pytest.raises(ValueError, match="draft_vocab must name a file of at most 8 characters, got more in"):
        choose_draft_ids(written(tmp_path, "7\n3\n9\n1\n5"), 100, ())
