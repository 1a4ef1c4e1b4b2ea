"""What a replica promises: a text that is equal for engines that decode equal tokens."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compiled_mtp
from compiled_mtp.config import EngineConfig

if TYPE_CHECKING:
    from compiled_mtp.engine import Engine

# Of each file of weights, what tells one checkpoint from another of the same shapes.
_SAMPLE_BYTES = 1 << 20
_PACKAGE = Path(__file__).parents[1]


def identify(config: EngineConfig, engine: Engine) -> str:
    """Return a text that differs with the checkpoint, the config, the device, the threads, the versions and,
    for a package that is edited where it lies, the code and tables of this one.
    """
    # Both wait for torch, which the ingress does without.
    from compiled_mtp.graphs.artifacts import machine_key, source_digest

    sources = source_digest((_PACKAGE, _PACKAGE / "ops", _PACKAGE / "graphs"))
    what: list[Any] = [platform.machine(), sorted(machine_key(engine.runner.device).items())]
    what += [compiled_mtp.__version__, sources, config.model_dump_json(), engine.num_threads]
    what += [engine.front.limits.longest, engine.runner.max_model_len]
    digest = hashlib.blake2b(repr(what).encode(), digest_size=16)
    for path in sorted(engine.front.path.iterdir()):
        if path.suffix in (".json", ".jinja", ".safetensors"):
            digest.update(path.name.encode() + _sample(path))
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_SAMPLE_BYTES)
        file.seek(max(0, size - _SAMPLE_BYTES))
        return size.to_bytes(8, "big") + head + file.read()
