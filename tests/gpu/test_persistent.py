"""persistent_kernel on the device: the bits of kernels for few rows, with and without cuts, and in graphs."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.k_splits import add_tree, count_k_splits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
    if torch.cuda.is_available()
    else pytest.mark.skip(reason="needs a CUDA device"),
]


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


# Tasks that are cut inside a chain and between chains, and whole ones; chains that wait in registers and in
# slots; a width that no tile divides.
@pytest.mark.parametrize(
    "n, k, parts, chains",
    [(34816, 1024, 1, 1), (5120, 4096, 4, 2), (5120, 4096, 2, 4), (5120, 4096, 1, 8), (16480, 1024, 1, 4)],
)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_sums_have_the_bits_of_few_rows(n: int, k: int, parts: int, chains: int, index: int) -> None:
    from compiled_mtp.ops.linear.config import LinearConfig
    from compiled_mtp.ops.linear.kernel import launch_config
    from compiled_mtp.ops.persistent_config import TILES, share_out
    from compiled_mtp.ops.persistent_product import launch_persistent

    x = torch.randn(520, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    config = LinearConfig(16, 64, 64, 4, 3, parts, chains, 0, sequential=True)
    wanted = launch_config(config, x, weight, None, True, keep_partials=True)
    for rows in (1, 64, 65, 128, 129, 256, 300, 520):
        product = share_out(TILES[2][index], rows, n, k, parts, chains, False, 2, processors())
        got = launch_persistent(product, x[:rows], weight, torch.float32)
        assert torch.equal(got, wanted[:, :rows]), f"{rows} rows"
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize(
    "n, k, chains", [(5120, 10240, 4), (5120, 6144, 8), (2560, 5120, 4), (1000, 2048, 8)]
)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_programs_that_share_a_tile_have_the_bits_of_few_rows(
    n: int, k: int, chains: int, index: int
) -> None:
    from compiled_mtp.ops.linear.config import LinearConfig
    from compiled_mtp.ops.linear.kernel import launch_config
    from compiled_mtp.ops.persistent_config import TILES, share_out, share_tiles
    from compiled_mtp.ops.persistent_product import launch_persistent

    x = torch.randn(300, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    config = LinearConfig(16, 64, 64, 4, 3, 1, chains, 0, sequential=True)
    wanted = launch_config(config, x, weight, None, True, keep_partials=True)
    counts = set()
    for rows in (1, 128, 129, 256, 300):
        product = share_out(TILES[2][index], rows, n, k, 1, chains, False, 2, processors())
        product = share_tiles(product, processors())
        counts.add(product.parts)
        got = launch_persistent(product, x[:rows], weight, torch.float32)
        assert torch.equal(got, wanted[:, :rows]), f"{rows} rows"
    assert max(counts) > 1
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize("n, k, parts", [(34816, 1024, 1), (5120, 4096, 2), (5120, 4096, 4), (5120, 4096, 8)])
def test_quantised_sums_have_the_bits_of_few_rows(n: int, k: int, parts: int) -> None:
    from compiled_mtp.ops.linear_w8a8.config import W8A8Config
    from compiled_mtp.ops.linear_w8a8.kernel import launch_config
    from compiled_mtp.ops.persistent_config import TILES, share_out
    from compiled_mtp.ops.persistent_product import launch_persistent
    from compiled_mtp.ops.quantize_rows import quantize_rows

    x, x_scale = quantize_rows(torch.randn(520, k, device="cuda").bfloat16())
    weight = (torch.randn(n, k, device="cuda") * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(n // 128, k // 128, device="cuda") * 1e-3 + 1e-4
    chains = count_k_splits(k) // parts if parts > 1 else 1
    length = k // (parts * chains)
    wanted = launch_config(W8A8Config(16, 128, 4, 4), x, x_scale, weight, scale, parts, length, torch.float32)
    for rows in (1, 65, 128, 129, 300, 520):
        product = share_out(TILES[1][0], rows, n, k, parts, chains, False, 1, processors())
        scales = {"x_scale": x_scale[:rows], "weight_scale": scale}
        got = launch_persistent(product, x[:rows], weight, torch.float32, **scales)
        assert torch.equal(got, wanted[:, :rows]), f"{rows} rows"
    assert not zero_counters(x.device).any()


def test_launches_follow_one_another_in_a_graph() -> None:
    """A product reads what the one before wrote, and its flags, slots and sums are its own."""
    from compiled_mtp.ops.linear import linear, linear_partials

    wide = (torch.randn(34816, 5120, device="cuda") * 5120**-0.5).bfloat16()
    narrow = (torch.randn(5120, 34816, device="cuda") * 34816**-0.5).bfloat16()
    x = torch.randn(256, 5120, device="cuda").bfloat16()

    def chain(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            rows = add_tree(linear_partials(linear(rows, wide), narrow, None, 4)).bfloat16()
        return rows

    wanted = torch.cat([chain(x[first : first + 16]) for first in range(0, 256, 16)])
    assert torch.equal(chain(x), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
