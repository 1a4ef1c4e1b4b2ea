"""Joins one choice's output from the replicas that decoded it, without repeats or gaps."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput, RoundDrafts
from compiled_mtp.streams.status import EngineStoppedError


class ReplicasDifferError(EngineStoppedError):
    """A replica that continues a stream decoded differently from the replica before it."""

    code = "replicas_differ"


class Delivery:
    """Drops from replicas' outputs of one choice what was delivered before.

    A replica that restarts the choice sends all tokens from the first. Delivered tokens are compared and
    dropped, with as many characters, log probabilities and drafts, wherever the replica's rounds end. The
    metrics count only rounds with delivered tokens.
    """

    def __init__(self, request_id: str, index: int, num_prompt: int) -> None:
        self.finish_reason: str | None = None
        self._request_id = request_id
        self._index = index
        self._history = RequestHistory(num_prompt, seed=0)
        self._token_ids: list[int] = []
        self._num_characters = 0
        self._num_logprobs = 0
        self._has_prompt_logprobs = False
        self._has_begun = False
        self._total_s = 0.0
        self.begin_again()

    def begin_again(self) -> None:
        """Expect another replica's outputs, from the choice's first token on."""
        self._seen_tokens = self._seen_characters = self._seen_logprobs = 0

    def take(self, received: RequestOutput, total_s: float) -> RequestOutput | None:
        """Return what is new in an output of a `HistoryTrimmer`, None if nothing is.

        total_s: seconds since the request arrived. Raises ReplicasDifferError if the output's tokens differ
        from the delivered ones, or end before them.
        """
        if self.finish_reason is not None:
            return None
        tokens = self._new_tokens(received.new_token_ids)
        text = received.new_text[max(0, self._num_characters - self._seen_characters) :]
        self._seen_characters += len(received.new_text)
        logprobs = received.logprobs
        if logprobs is not None:
            num_seen, self._seen_logprobs = self._seen_logprobs, self._seen_logprobs + len(logprobs)
            logprobs = logprobs[max(0, self._num_logprobs - num_seen) :]
        of_prompt = None if self._has_prompt_logprobs else received.prompt_logprobs
        if received.finish_reason in ("stop", "length") and self._is_behind():
            raise ReplicasDifferError(
                f"replicas must decode the same tokens, got an end after {self._seen_tokens} of "
                f"{len(self._token_ids)} delivered tokens; give all replicas one checkpoint, one device and "
                "one version"
            )
        if not (tokens or text or logprobs or of_prompt or received.finish_reason):
            return None
        self._token_ids += tokens
        self._num_characters += len(text)
        self._num_logprobs += len(logprobs or ())
        self._has_prompt_logprobs |= of_prompt is not None
        self.finish_reason = received.finish_reason
        return received._replace(
            request_id=self._request_id,
            new_token_ids=tokens,
            new_text=text,
            metrics=self._count(received.metrics.history, total_s),
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
            drafts=_cut(received.drafts, len(received.new_token_ids) - len(tokens), len(tokens)),
        )

    def abort(self, total_s: float) -> RequestOutput:
        """Return the last output of a choice that is aborted."""
        self.finish_reason, self._total_s = "abort", total_s
        return RequestOutput(self._request_id, [], "", self._metrics(), "abort", index=self._index)

    def _new_tokens(self, token_ids: list[int]) -> list[int]:
        start = self._seen_tokens
        known = self._token_ids[start : start + len(token_ids)]
        if token_ids[: len(known)] != known:
            raise ReplicasDifferError(
                f"replicas must decode the same tokens, got others from token {start} of "
                f"{len(self._token_ids)} delivered tokens; give all replicas one checkpoint, one device and "
                "one version"
            )
        self._seen_tokens += len(token_ids)
        return token_ids[len(known) :]

    def _is_behind(self) -> bool:
        return self._seen_tokens < len(self._token_ids) or self._seen_characters < self._num_characters

    def _count(self, received: RequestHistory, total_s: float) -> RequestMetrics:
        history = self._history
        if not self._has_begun:
            self._has_begun = True
            history.seed, history.mtp_step = received.seed, received.mtp_step
            history.max_drafts = received.max_drafts
            history.cached_tokens = received.cached_tokens
            history.image_tokens = received.image_tokens
        if self._token_ids and history.time_to_first_token_s is None:
            history.time_to_first_token_s = total_s
        history.rounds += received.rounds
        self._total_s = total_s
        return self._metrics()

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics(self._history, len(self._history.rounds), len(self._token_ids), self._total_s)


def _cut(drafts: Sequence[RoundDrafts] | None, num_known: int, num_new: int) -> list[RoundDrafts] | None:
    """Return the drafts of an output's rounds after its first num_known tokens; num_new tokens remain.

    The scheduler cuts drafts the same way when it replays a preempted request.
    """
    if drafts is None or not num_known:
        return None if drafts is None else list(drafts)
    kept = []
    for one in drafts:
        num_tokens = one.num_accepted + 1
        if num_known < num_tokens and num_new:
            kept.append(
                one._replace(token_ids=one.token_ids[num_known:], num_accepted=one.num_accepted - num_known)
            )
        num_known = max(0, num_known - num_tokens)
    return kept
