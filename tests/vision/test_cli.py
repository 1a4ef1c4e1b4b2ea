"""Images in the commands: `run --image`, content parts of a prompt file, and `/image` of a chat."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import chat, inspect, run
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.server import serve
from tests.docs.error_texts import ROOT
from tests.engines import make_engine
from tests.vision.checkpoints import picture
from tests.vision.test_images import damaged_files

FLAGS = ["--max-tokens", "6", "--temperature", "0", "--device", "cpu", "--max-model-len", "512"]
PARAMS = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "a picture.png"
    picture(96, 64).save(path)
    return path


@pytest.fixture(scope="module")
def wanted(dense: Path, image: Path) -> dict[int, str]:
    """An engine's answers with one image and with two."""
    engine, texts = make_engine(dense, max_images=2), {}
    for count in (1, 2):
        content = [{"type": "image", "image": image}] * count + [{"type": "text", "text": "What?"}]
        (output,) = engine.generate(messages=[{"role": "user", "content": content}], params=PARAMS)
        texts[count] = output.new_text
    return texts


def test_run_with_images(dense: Path, image: Path, wanted: dict[int, str], capfd: Any) -> None:
    """The flag loads the tower for as many images as it names."""
    for count in (1, 2):
        images = ["--image", str(image)] * count
        assert run.main(["--model", str(dense), "--prompt", "What?", *images, *FLAGS]) == 0
        assert capfd.readouterr().out.strip() == wanted[count].strip()


def test_a_prompt_file_with_images(
    dense: Path, image: Path, wanted: dict[int, str], tmp_path: Path, capfd: Any
) -> None:
    lines = []
    for count in (2, 0, 1):
        parts = [{"type": "image", "image": str(image)}] * count + [{"type": "text", "text": "What?"}]
        lines.append({"messages": [{"role": "user", "content": parts}], "id": count})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--prompt-file", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert run.main(["--model", str(dense), *files, *FLAGS]) == 0
    found = {one["id"]: one["text"] for one in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert {count: found[count] for count in wanted} == wanted


def test_a_long_file_keeps_few_images(
    dense: Path, image: Path, wanted: dict[int, str], tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(run, "_MOST_WITH_IMAGES", 2)
    num_open, add_request = list[int](), Engine.add_request

    def add(engine: Engine, *given: Any, **named: Any) -> str:
        name = add_request(engine, *given, **named)
        num_open.append(len(engine._inbox) + len(engine.scheduler._live.choices))
        return name

    # A part without a type is an image too.
    parts: list[Any] = [{"image": str(image)}, {"type": "text", "text": "What?"}]
    line = json.dumps({"messages": [{"role": "user", "content": parts}]})
    (tmp_path / "in.jsonl").write_text(f"{line}\n" * 7)
    monkeypatch.setattr(Engine, "add_request", add)
    files = ["--prompt-file", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert run.main(["--model", str(dense), *files, *FLAGS]) == 0
    assert [json.loads(one)["text"] for one in (tmp_path / "out.jsonl").open()] == [wanted[1]] * 7
    assert len(num_open) == 7
    assert max(num_open) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--prompt", "a", "--image", "nowhere.png"],
            "prompt 0: image must be a file that exists, got nowhere",
        ),
        (
            ["--prompt", "a", "--image", "https://example.org/cat.png"],
            "prompt 0: image must be a file on this machine, got https://example.org/cat.png; download it",
        ),
        (["--prompt", "a", "--image", "x", "--max-images", "0"], "images must be left out, got 1"),
        (["--prompt-file", "a.txt", "--image", "x"], "image must come with --prompt"),
    ],
)
def test_mistakes_are_one_line(dense: Path, capfd: Any, flags: list[str], says: str) -> None:
    assert run.main(["--model", str(dense), *flags, *FLAGS]) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert says in said


def test_a_chat_with_images(
    dense: Path, image: Path, wanted: dict[int, str], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = f"/image nowhere\n/image\n/image {image}\nWhat?\n/clear\n"
    # Paths as terminals paste dropped files; a third image is refused at once, and the chat goes on.
    monkeypatch.setenv("HOME", str(image.parent))
    typed += f"/image '{image}'\n/image ~/{image.name}\n/image {image}\nWhat?\n/image {image}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert chat.main(["--model", str(dense), "--max-images", "2", *FLAGS]) == 0
    said = capfd.readouterr()
    assert said.out == f"{wanted[1]}\n{wanted[2]}\n"
    assert "error: image must be a file that exists, got nowhere" in said.err
    assert "error: /image must come with a file; write /image FILE" in said.err
    assert said.err.count("error: images of a chat must be at most 2 (max_images), got one more;") == 2
    assert said.err.count("[image of 6 tokens; write a message to it]") == 3


def test_the_examples_of_the_page(
    dense: Path, capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "images.md").read_text().replace("Qwen/Qwen3.5-4B", str(dense))
    found = re.findall(r"^```(bash|python)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in found] == ["bash", "python"]
    monkeypatch.chdir(tmp_path)
    picture(64, 64).save("cat.jpg")
    first, second = found[0][1].splitlines()
    assert run.main([*shlex.split(first)[2:], "--max-tokens", "4"]) == 0
    serve.make_parser().parse_args(shlex.split(second)[2:])
    exec(compile(found[1][1], "images.md", "exec"), {})
    assert len(capfd.readouterr().out) > 4


def test_every_damaged_file_ends_a_run_in_one_line(dense: Path, tmp_path: Path, capfd: Any) -> None:
    """Before the weights are loaded."""
    flags = ["--model", str(dense), "--prompt", "a", "--image", str(tmp_path / "damaged"), *FLAGS]
    for name, content, says in damaged_files():
        (tmp_path / "damaged").write_bytes(content)
        assert run.main(flags) == 2, name
        (line,) = capfd.readouterr().err.strip().splitlines()
        assert re.search(says, line), name
        assert line.startswith("error: prompt 0: image must ")


def test_inspect_names_the_tower(dense: Path, capfd: Any) -> None:
    assert inspect.main([str(dense), "--device", "cpu"]) == 0
    assert "vision      33 weights of 0.9 MiB, which max_images loads" in capfd.readouterr().out


def test_a_chat_without_a_tower_says_so(dense: Path, image: Path, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {image}\n"))
    assert chat.main(["--model", str(dense), *FLAGS]) == 0
    assert "error: images must be left out, got 1; start the engine with max_images" in capfd.readouterr().err
