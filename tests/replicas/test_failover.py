"""A stream whose replica dies continues without a difference, wherever the replica's rounds end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.replicas.delivery import ReplicasDifferError
from compiled_mtp.replicas.messages import Accepted, Call, Message, Refused
from compiled_mtp.replicas.metrics import ReplicaMetrics
from compiled_mtp.replicas.relay import ReplicasLostError
from compiled_mtp.request import RequestOutput, RoundDrafts, SamplingParams
from compiled_mtp.server.errors import ApiError
from compiled_mtp.server.generation import merged
from compiled_mtp.streams.status import EngineStoppedError, QueueFullError, SlowReaderError
from compiled_mtp.streams.stream import Stream
from tests.replicas.scripted import PROMPT, Replica, Truth, entry, in_turn, make_engine, read


@st.composite
def truths(draw: st.DrawFn) -> Truth:
    """Tokens with any text; characters and entries may be held back for any number of tokens."""
    token_ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
    text = draw(st.text("abc é", max_size=40))
    places = st.lists(st.integers(0, len(text)), min_size=len(token_ids), max_size=len(token_ids))
    shown = [0, *sorted(draw(places))]
    told = None
    if draw(st.booleans()):
        held = draw(st.integers(0, 3))
        told = [max(0, k - held) for k in range(len(token_ids) + 1)]
    reason = draw(st.sampled_from(["stop", "length"]))
    of_prompt = draw(st.sampled_from([None, [entry(2), entry(3)]]))
    return Truth(token_ids, text, shown, told, reason, of_prompt, draw(st.booleans()))


def joined(outputs: Sequence[RequestOutput], index: int) -> tuple[Any, ...]:
    """One choice as a client joins it."""
    own = [one for one in outputs if one.index == index]
    entries = [e for one in own for e in one.logprobs or ()]
    of_prompt = [one.prompt_logprobs for one in own if one.prompt_logprobs is not None]
    return (
        [i for one in own for i in one.new_token_ids],
        "".join(one.new_text for one in own),
        entries if any(one.logprobs is not None for one in own) else None,
        of_prompt,
        [one.finish_reason for one in own if one.finish_reason is not None],
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(truths(), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=3),
    st.integers(0, 2**32),
)
def test_streams_do_not_notice_deaths(choices: list[Truth], deaths: list[int], seed: int) -> None:
    sizes = random.Random(seed)
    replicas = [Replica(f"r{i}", choices, sizes, after) for i, after in enumerate([*deaths, None])]
    metrics = ReplicaMetrics()
    engine = make_engine(in_turn(*replicas), metrics)
    params = SamplingParams(n=len(choices), temperature=1.0)
    with pytest.MonkeyPatch.context() as patch:
        # Another test covers replicas that die without a new token.
        patch.setattr("compiled_mtp.replicas.relay._MOST_FRUITLESS", 9)
        outputs = asyncio.run(read(engine, params=params))
    for index, truth in enumerate(choices):
        entries = None if truth.told is None else [entry(i) for i in truth.token_ids]
        of_prompt = [] if truth.prompt_logprobs is None else [truth.prompt_logprobs]
        expected = (truth.token_ids, truth.text, entries, of_prompt, [truth.finish_reason])
        assert joined(outputs, index) == expected
        own = [one for one in outputs if one.index == index]
        last = own[-1]
        for one in own:
            # The accepted drafts are the first of the new tokens.
            kept = len(one.new_token_ids) - 1
            rounds = [RoundDrafts([*one.new_token_ids[:kept], -1], kept)] if kept >= 0 else []
            assert one.drafts == (rounds if truth.has_drafts else None)
        assert last.metrics.output_tokens == len(truth.token_ids)
        assert last.metrics.prompt_tokens == len(PROMPT)
    used = [replica for replica in replicas if replica.calls]
    # The seed was set before the first replica had the request, and each call names the replicas to avoid.
    assert len({call.params.seed for replica in used for call in replica.calls}) == 1
    assert used[0].calls[0].params.seed is not None
    died = [replica.name for replica in used[:-1] if replica.dies_after]
    assert list(used[-1].calls[0].avoid) == died
    assert engine.num_open == 0
    text = metrics.text().decode()
    assert f"compiled_mtp_failovers_total {len(used) - 1}.0" in text
    assert f"compiled_mtp_output_tokens_total {sum(len(t.token_ids) for t in choices)}.0" in text


ONE = Truth([5, 6, 7, 8, 9, 10], "abcdef", list(range(7)))


def replica(name: str = "a", truth: Truth = ONE, **fields: Any) -> Replica:
    return Replica(name, [truth], random.Random(1), **fields)


def test_too_many_deaths_are_an_error_by_name_behind_what_was_sent() -> None:
    metrics = ReplicaMetrics()
    engine = make_engine(
        in_turn(*(replica(c, dies_after=n, most=1) for n, c in enumerate("abcd", 1))),
        metrics,
        max_failovers=2,
    )

    outputs: list[RequestOutput] = []

    async def run() -> None:
        (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT}])
        async for output in stream:
            outputs.append(output)

    with pytest.raises(ReplicasLostError, match=r"one of 3 replicas, got losses alone, the last: .*died"):
        asyncio.run(run())
    assert outputs
    assert ReplicasLostError.code == "replicas_lost"
    assert "compiled_mtp_requests_lost_total 1.0" in metrics.text().decode()


def test_a_replica_that_always_fails_after_its_first_output_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.relay._PAUSE_S", 0.001)
    alone = replica("a", dies_after=1, most=1)
    with pytest.raises(ReplicasLostError, match="a new token from one of 2 replicas, got losses alone"):
        asyncio.run(read(make_engine(in_turn(alone))))
    assert len(alone.calls) == 2
    # Each replica sends one token more than the one before it, under the same id: every loss still counts.
    alike = [replica("a", dies_after=n, most=1) for n in range(1, 6)]
    metrics = ReplicaMetrics()
    with pytest.raises(ReplicasLostError, match="by one of 3 replicas"):
        asyncio.run(read(make_engine(in_turn(*alike), metrics, max_failovers=2)))
    assert [len(one.calls) for one in alike] == [1, 1, 1, 0, 0]
    assert "compiled_mtp_failovers_total 2.0" in metrics.text().decode()


def test_a_request_that_kills_engines_does_not_kill_them_all() -> None:
    deaths = [replica(name, dies_after=1, most=1) for name in "abcd"]
    with pytest.raises(ReplicasLostError, match="or change the request if it always ends like this"):
        asyncio.run(read(make_engine(in_turn(*deaths))))
    assert [len(one.calls) for one in deaths] == [1, 1, 0, 0]


def test_what_is_refused_once_another_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.relay._PAUSE_S", 0.001)
    invalid = Refused("invalid", "top_k must be small, got 9; lower it", "b")
    engine = make_engine(in_turn(replica(dies_after=1), replica("b", refuses=invalid)))
    with pytest.raises(
        ReplicasDifferError, match=r"must accept the same requests, got .*top_k must be small"
    ):
        asyncio.run(read(engine))
    # A replica had accepted the request, so it waits for room, though no output was sent.
    full = [replica("b", refuses=Refused("full", "no room", "b")) for _ in range(5)]
    engine = make_engine(in_turn(Mute("a", [ONE], random.Random(1)), *full, replica("c")))
    assert joined(asyncio.run(read(engine)), 0)[0] == ONE.token_ids


class Mute(Replica):
    """Accepts a request and dies before its first output."""

    async def decode(self, call: Call) -> AsyncIterator[Message]:
        """Decode as EngineReplica does."""
        self.calls.append(call)
        yield Accepted(self.name, self.identity)
        raise ConnectionError(f"{self.name} died")


def test_an_answer_that_has_begun_ends_with_an_error_that_a_client_can_read() -> None:
    async def answer(error: Exception) -> ApiError:
        stream = Stream(lambda _: None, asyncio.get_running_loop(), 8, 1)
        stream.fail(error)
        with pytest.raises(ApiError) as caught:
            _ = [one async for one in merged([stream])]
        return caught.value

    for error, status in (
        (QueueFullError("full", 3), 429),
        (ReplicasDifferError("differ"), 503),
        (ValueError("prompt must be short"), 400),
    ):
        assert asyncio.run(answer(error)).status == status


def test_a_bug_behind_the_first_output_is_not_the_clients_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: Any) -> None:
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr("compiled_mtp.replicas.delivery.Delivery.take", take)
    with pytest.raises(EngineStoppedError, match="the request failed: ValueError"):
        asyncio.run(read(make_engine(in_turn(replica()))))


def test_streams_that_end_with_an_error_are_counted_and_forgotten() -> None:
    metrics = ReplicaMetrics()
    engine = make_engine(in_turn(replica(dies_after=1)), metrics, max_failovers=0)
    with pytest.raises(ReplicasLostError):
        asyncio.run(read(engine))
    assert metrics._last_s == {}
    assert 'requests_finished_total{reason="error"} 1.0' in metrics.text().decode()
    # A request that no replica accepted does not count as finished.
    refused = replica(refuses=Refused("invalid", "no", "a"))
    with pytest.raises(ValueError, match="no"):
        asyncio.run(read(make_engine(in_turn(refused), metrics)))
    assert 'requests_finished_total{reason="error"} 1.0' in metrics.text().decode()


def test_other_tokens_never_go_on_a_stream() -> None:
    other = Truth([5, 9, 9, 9, 9, 9], "abcdef", list(range(7)))
    short = Truth([5], "a", [0, 1])

    for second in (other, short):
        sizes = random.Random(1)
        first = Replica("a", [ONE], sizes, dies_after=3, most=1)
        engine = make_engine(in_turn(first, Replica("b", [second], sizes)))
        with pytest.raises(ReplicasDifferError, match="must decode the same tokens"):
            asyncio.run(read(engine))


def test_a_replica_of_another_kind_does_not_go_on() -> None:
    engine = make_engine(in_turn(replica(dies_after=1), replica("b", identity="other")))
    with pytest.raises(ReplicasDifferError, match="must be equal for a stream to go on, got 'other'"):
        asyncio.run(read(engine))
    # Nothing was delivered: the second replica sends all of it.
    engine = make_engine(in_turn(replica(dies_after=0), replica("b", identity="other")))
    assert joined(asyncio.run(read(engine)), 0)[0] == ONE.token_ids


def test_an_error_is_told_when_another_replica_says_it_too() -> None:
    failing = Truth(ONE.token_ids, ONE.text, ONE.shown, finish_reason="error")
    good = make_engine(in_turn(replica(truth=failing), replica("b")))
    assert asyncio.run(read(good))[-1].finish_reason == "stop"
    bad = make_engine(in_turn(replica(truth=failing), replica("b", failing)))
    outputs = asyncio.run(read(bad))
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error == "it failed"
    assert joined(outputs, 0)[0] == ONE.token_ids
    # The request may not restart.
    alone = replica(truth=failing)
    outputs = asyncio.run(read(make_engine(in_turn(alone), max_failovers=0)))
    assert (outputs[-1].finish_reason, outputs[-1].error) == ("error", "it failed")


def test_refusals() -> None:
    invalid = Refused("invalid", "top_k must be small, got 9; lower it", "a")
    full = Refused("full", "the queue must have room", "a", retry_after_s=9)
    stopped = Refused("stopped", "shutting down", "a")
    with pytest.raises(ValueError, match="top_k must be small"):
        asyncio.run(read(make_engine(in_turn(replica(refuses=invalid)))))
    with pytest.raises(QueueFullError) as caught:
        asyncio.run(read(make_engine(in_turn(replica(refuses=full)))))
    assert caught.value.retry_after_s == 9
    for refused in (full, stopped):
        second = replica("b")
        engine = make_engine(in_turn(replica(refuses=refused), second))
        assert joined(asyncio.run(read(engine)), 0)[0] == ONE.token_ids
        assert second.calls[0].avoid == ("a",)


def test_a_begun_stream_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.relay._PAUSE_S", 0.01)
    full = Refused("full", "the queue must have room", "b")
    busy = [replica("b", refuses=full) for _ in range(5)]
    engine = make_engine(in_turn(replica(dies_after=1), *busy, replica("c")))
    assert joined(asyncio.run(read(engine)), 0)[0] == ONE.token_ids
    engine = make_engine(in_turn(replica(dies_after=1), *busy), start_timeout_s=0.05)
    with pytest.raises(ReplicasLostError, match="must find a replica within"):
        asyncio.run(read(engine))


def test_a_replica_that_stands_alone_is_asked_until_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_mtp.replicas.relay._PAUSE_S", 0.01)
    stopped = Refused("stopped", "the engine died", "a")
    dead = [replica("a", refuses=stopped) for _ in range(6)]
    last = replica("b")
    engine = make_engine(in_turn(replica("a", dies_after=2), *dead, last), max_failovers=1)
    assert joined(asyncio.run(read(engine)), 0)[0] == ONE.token_ids
    assert last.calls[0].avoid == ("a",)
    engine = make_engine(in_turn(*dead), start_timeout_s=0.05)
    with pytest.raises(ReplicasLostError, match=r"a replica within 0\.05 s, got 'the engine died'"):
        asyncio.run(read(engine))


def test_no_replica_begins() -> None:
    class Silent(Replica):
        async def decode(self, call: Any) -> Any:
            self.calls.append(call)
            await asyncio.sleep(60)
            yield []

    silent = Silent("a", [ONE], random.Random())
    metrics = ReplicaMetrics()
    engine = make_engine(in_turn(silent), metrics, start_timeout_s=0.01)
    with pytest.raises(ReplicasLostError, match=r"must find a replica within 0\.01 s, got none"):
        asyncio.run(read(engine))
    assert len(silent.calls) == 1
    text = metrics.text().decode()
    assert "compiled_mtp_failovers_total 0.0" in text
    assert "compiled_mtp_requests_lost_total 1.0" in text
    # The time of one replica's refusals counts against the wait for the next.
    stopped = replica("b", refuses=Refused("stopped", "shutting down", "b"))
    engine = make_engine(in_turn(stopped, stopped, silent), start_timeout_s=0.6)
    start_s = time.monotonic()
    with pytest.raises(ReplicasLostError, match=r"within 0\.6 s, got none"):
        asyncio.run(read(engine))
    assert time.monotonic() - start_s < 0.9


@settings(deadline=None, max_examples=12)
@given(truths(), st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 2**32))
def test_streams_do_not_notice_replicas_that_hang(truth: Truth, silences: list[int], seed: int) -> None:
    sizes = random.Random(seed)
    hanging = [Replica(f"r{i}", [truth], sizes, after, hangs=True) for i, after in enumerate(silences)]
    last = Replica("last", [truth], sizes)
    engine = make_engine(in_turn(*hanging, last), silence_timeout_s=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_mtp.replicas.relay._MOST_FRUITLESS", 9)
        outputs = asyncio.run(asyncio.wait_for(read(engine), 20))
    assert joined(outputs, 0)[:2] == (truth.token_ids, truth.text)
    # A call that timed out is closed at the replica where it hangs.
    assert [one.num_open for one in hanging] == [0] * len(hanging)
    assert engine.num_open == 0


def test_a_silent_replica_is_named_when_no_other_goes_on() -> None:
    alone = replica("a", dies_after=3, most=1, hangs=True)
    engine = make_engine(in_turn(alone), silence_timeout_s=0.05, max_failovers=0)
    with pytest.raises(ReplicasLostError, match=r"the last: 'it sent nothing for 0\.05 s'"):
        asyncio.run(asyncio.wait_for(read(engine), 20))


def test_a_replica_that_says_that_it_lives_keeps_its_stream() -> None:
    slow = replica("a", beats=10, beat_s=0.02)
    engine = make_engine(in_turn(slow, replica("b")), silence_timeout_s=0.1)
    outputs = asyncio.run(read(engine))
    assert joined(outputs, 0)[0] == ONE.token_ids
    assert len(slow.calls) == 1
    # Heartbeats are not outputs.
    assert all(one.new_token_ids or one.finish_reason for one in outputs)


def test_a_pause_of_the_ingress_is_no_silence_of_its_replicas() -> None:
    replicas = [replica("a", beats=2, beat_s=0.01), replica("b")]
    engine = make_engine(in_turn(*replicas), silence_timeout_s=0.2)

    async def run() -> list[RequestOutput]:
        (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT}])
        for _ in range(3):
            await asyncio.sleep(0.015)
            # Block the event loop: it cannot read what replicas send meanwhile.
            time.sleep(0.5)
        return [output async for output in stream]

    assert joined(asyncio.run(run()), 0)[0] == ONE.token_ids
    assert [len(one.calls) for one in replicas] == [1, 0]


def test_an_abort_ends_the_call_and_tells_the_stream() -> None:
    long = Truth([1] * 500, "x" * 500, list(range(501)))
    slow = replica(truth=long)
    metrics = ReplicaMetrics()
    engine = make_engine(in_turn(slow), metrics)

    async def run() -> list[RequestOutput]:
        (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT}])
        outputs = [await anext(stream)]
        assert (slow.num_open, engine.num_open) == (1, 1)
        stream.abort()
        outputs += [output async for output in stream]
        assert (slow.num_open, engine.num_open) == (0, 0)
        return outputs

    outputs = asyncio.run(run())
    assert [one.finish_reason for one in outputs if one.finish_reason] == ["abort"]
    assert 'requests_finished_total{reason="abort"} 1.0' in metrics.text().decode()


def test_a_reader_that_falls_behind_is_aborted() -> None:
    long = Truth([1] * 500, "x" * 500, list(range(501)))
    slow = replica(truth=long)
    engine = make_engine(in_turn(slow), stream_buffer=3)

    async def run() -> None:
        (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT}])
        while slow.num_open:
            await asyncio.sleep(0.001)
        with pytest.raises(SlowReaderError):
            _ = [output async for output in stream]

    asyncio.run(run())


def test_several_requests_are_added_together_or_not_at_all() -> None:
    good = replica()
    bad = replica("b", refuses=Refused("invalid", "prompt must be short", "b"))
    engine = make_engine(in_turn(good, bad))

    async def run() -> None:
        with pytest.raises(ValueError, match="prompt must be short"):
            await engine.add_all([{"prompt_token_ids": PROMPT}] * 2)
        await asyncio.sleep(0.01)
        assert (good.num_open, engine.num_open) == (0, 0)
        with pytest.raises(ValueError, match="n must be at most 8"):
            await engine.add_all([{"prompt_token_ids": PROMPT}] * 9)

    asyncio.run(run())


def test_the_queue_and_the_end() -> None:
    engine = make_engine(in_turn(replica()), max_open=1)

    async def run() -> None:
        (stream,) = await engine.add_all([{"prompt_token_ids": PROMPT}])
        with pytest.raises(QueueFullError):
            await engine.add_all([{"prompt_token_ids": PROMPT}])
        assert engine.status == "ok"
        ended = asyncio.create_task(engine.drain(5))
        assert [one async for one in stream][-1].finish_reason == "stop"
        assert await ended
        assert engine.status == "stopped"
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await engine.add_all([{"prompt_token_ids": PROMPT}])

    asyncio.run(run())


def test_seeds_are_those_of_one_engine() -> None:
    from compiled_mtp.request import derive_seed

    one = replica()
    engine = make_engine(in_turn(one), seed=11)

    async def run() -> None:
        await read(engine)
        await read(engine, params=SamplingParams(seed=3))
        await read(engine)

    asyncio.run(run())
    assert [call.params.seed for call in one.calls] == [11, 3, derive_seed(11, 2)]
