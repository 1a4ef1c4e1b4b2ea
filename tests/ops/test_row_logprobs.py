"""row_logprobs: against NumPy, its ties, row invariance, kernel and registration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_mtp.ops.row_logprobs import NUM_TOP, row_logprobs
from tests.ops.harness import assert_same_bits, check_compiles, check_launch, check_registration
from tests.sampling import numpy_sampling


def make_arguments(vocab: int, num_valid_ids: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return rows: plain, full of ties, masked except for a few ids, all masked, and with values that are not
    finite."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator) * 4
    logits[1] = logits[1].round()
    logits[2, 4:] = float("-inf")
    logits[3] = float("-inf")
    logits[4, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    logits[5] = 1.0
    return logits, torch.randint(0, num_valid_ids, (6,), generator=generator), num_valid_ids


@pytest.mark.parametrize("vocab", [3, 37, 5000])
def test_rows_equal_numpy(vocab: int) -> None:
    logits, chosen, _ = arguments = make_arguments(vocab, vocab)
    logprob, rank, top_ids, top_logprobs, entropy = row_logprobs(*arguments)
    for row in (0, 1, 2, 5) if vocab == 3 else (0, 1, 2, 4, 5):
        wanted = numpy_sampling.logprobs(logits[row].numpy(), int(chosen[row]), NUM_TOP)
        np.testing.assert_allclose(float(logprob[row]), wanted.logprob, rtol=0, atol=4e-6)
        assert int(rank[row]) == wanted.rank
        listed = int((top_logprobs[row] > float("-inf")).sum())
        assert top_ids[row, :listed].tolist() == [token for token, _ in wanted.top]
        found = top_logprobs[row, :listed].tolist()
        np.testing.assert_allclose(found, [value for _, value in wanted.top], rtol=0, atol=4e-6)
        assert top_ids[row, listed:].tolist() == [0] * (NUM_TOP - listed)
        wanted_entropy = numpy_sampling.entropy(logits[row].numpy())
        np.testing.assert_allclose(float(entropy[row]), wanted_entropy, rtol=0, atol=4e-6)
    assert (logprob[3], int(rank[3])) == (float("-inf"), 1 + int(chosen[3]))
    assert (top_logprobs[3] == float("-inf")).all()
    assert float(entropy[3]) == 0


def test_ids_that_no_token_has_are_not_listed() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0]])
    logprob, rank, top_ids, top, _ = row_logprobs(logits, torch.tensor([2]), 3)
    exact = torch.log_softmax(logits, -1)[0]
    assert int(rank) == 2
    assert top_ids[0, :4].tolist() == [1, 2, 0, 0]
    torch.testing.assert_close(top[0, :3], exact[[1, 2, 0]])
    torch.testing.assert_close(logprob[0], exact[2])
    assert (top[0, 3:] == float("-inf")).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_rows_do_not_depend_on_other_rows(threads: int) -> None:
    # ATen splits a sum of more than 32,768 values over threads if it is the only sum of the call.
    logits, chosen, valid = make_arguments(50000, 49999)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = row_logprobs(logits, chosen, valid)
        for row in range(6):
            alone = row_logprobs(logits[row : row + 1], chosen[row : row + 1], valid)
            assert_same_bits(alone, [t[row : row + 1] for t in together])
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab, num_valid_ids", [(10, 10), (150, 140), (5000, 4990)])
def test_kernel_in_interpreter(interpreter: None, vocab: int, num_valid_ids: int) -> None:
    check_launch(row_logprobs, make_arguments(vocab, num_valid_ids), rtol=0, atol=4e-6)


def test_registration_and_compile() -> None:
    check_registration(torch.ops.compiled_mtp.row_logprobs.default, make_arguments(37, 30))
    check_compiles(row_logprobs, [make_arguments(37, 30)])


def test_bad_arguments_raise() -> None:
    logits, chosen, valid = make_arguments(37, 30)
    with pytest.raises(ValueError, match=r"num_valid_ids must be in 1\.\.37, got 38"):
        row_logprobs(logits, chosen, 38)
    with pytest.raises(ValueError, match="chosen must have shape"):
        row_logprobs(logits, chosen[:5], valid)
    with pytest.raises(ValueError, match="logits must have dtype"):
        row_logprobs(logits.double(), chosen, valid)
