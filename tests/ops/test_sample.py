"""sample: noise, distribution, processors, ties and invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compiled_mtp.ops.sample import sample
from compiled_mtp.ops.sample.reference import gumbel, philox


def arguments(logits: torch.Tensor, requests: int = 1, slots: int = 4, **over: Any) -> dict[str, Any]:
    """Neutral arguments for `logits`, one request a slot from slot 1 on; tables broadcast from scalars."""
    rows, vocab = logits.shape
    dtypes = {
        "temperature": torch.float32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "repetition_penalty": torch.float32,
        "presence_penalty": torch.float32,
        "frequency_penalty": torch.float32,
        "top_k": torch.int32,
        "seed": torch.int64,
        "min_position": torch.int64,
    }
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0, "seed": 7}
    case: dict[str, Any] = {
        "logits": logits,
        "tokens": torch.zeros(rows, dtype=torch.int64),
        "positions": torch.arange(rows) + 10,
        "state_index": torch.arange(1, requests + 1, dtype=torch.int32),
        "output_counts": torch.zeros(0, vocab, dtype=torch.int32),
        "prompt_seen": torch.zeros(0, vocab, dtype=torch.bool),
        "bias": torch.zeros(0, vocab),
        "stop_ids": torch.zeros(0, 1, dtype=torch.int64),
        "num_valid_ids": vocab,
    }
    for name, dtype in dtypes.items():
        value = over.pop(name, neutral.get(name, 0))
        case[name] = torch.as_tensor(value, dtype=dtype).expand(slots).contiguous()
    return case | over


def numpy_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as published (Salmon et al. 2011, section 4.3), in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return c


def signed(low: int, high: int) -> int:
    return int(np.array([high << 32 | low], dtype=np.uint64).view(np.int64)[0])


def test_philox_known_answers() -> None:
    # Random123's kat_vectors, philox 4x32 10.
    known = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, words in known:
        assert numpy_philox(counter, key) == words
    generator = np.random.default_rng(0)
    for _ in range(50):
        block, seed_low, seed_high, low, high = (int(v) for v in generator.integers(0, 1 << 32, 5))
        got = philox(
            torch.tensor([[block]]),
            torch.tensor([signed(seed_low, seed_high)]),
            torch.tensor([signed(low, high)]),
        )
        assert got[0, 0].tolist() == numpy_philox([block, 0, low, high], [seed_low, seed_high])


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0))
    logits[2, 100] = logits[2, 900] = 50.0
    token, logprob = sample(**arguments(logits, requests=2))
    assert torch.equal(token, logits.argmax(-1))
    assert token[2] == 100
    expected = torch.log_softmax(logits.double(), -1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), expected, rtol=0, atol=2e-6)


def test_noise_is_keyed_by_seed_position_and_id() -> None:
    seed, position = torch.tensor([-3, 1 << 40]), torch.tensor([5, 1 << 33])
    noise = gumbel(seed, position, 1003)
    ids = torch.tensor([[0, 3, 4, 1002], [7, 6, 5, 999]])
    assert torch.equal(gumbel(seed, position, 1003, ids), noise.gather(1, ids))
    logits = torch.randn(1, 1003, generator=torch.Generator().manual_seed(1))
    token, _ = sample(**arguments(logits, temperature=0.7, seed=-3, positions=torch.tensor([5])))
    assert token[0] == (logits[0] / 0.7 + noise[0]).argmax()
