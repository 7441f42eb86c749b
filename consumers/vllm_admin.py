"""A vLLM server's administration, one call a method, every answer checked.

Knows the HTTP interface of vLLM 0.32 in development mode: pause, reload, version label, probe, resume.
"""

import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from schemas.errors import ReplaygroundError

PROBE_MARK = "replayground-probe"  # the same as in consumers.vllm_scheduler, which only vLLM may import
RELOAD_METHOD = "reload_weights_and_tied_head"  # of consumers.vllm_worker
_ANSWER_CHARACTERS_MAX = 500


class ServerUnreachable(ReplaygroundError):
    """Nobody answers at the server's address, or the answer did not come in time."""


class ServerRefused(ReplaygroundError):
    """The server answered, but not that it did what was asked."""


class VllmAdmin:
    """One server. Every call blocks until the server has answered, at most `timeout_seconds`.

    Raises ServerUnreachable or ServerRefused; returning means that the server said it is done.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        # vLLM closes a connection after an error, so none is kept to be found closed by the next call
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=timeout_seconds, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """Whether the server answers that it is up; never raises."""
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def weight_version(self) -> str:
        """The label of the weights, as the server reports it; "default" after a start."""
        return str(self._request("GET", "/weight_info")["weight_version"])

    def is_paused(self) -> bool:
        return bool(self._request("GET", "/is_paused")["is_paused"])

    def pause(self, mode: str, timeout_seconds: float) -> None:
        """Returns when no turn is under way and new ones are held back."""
        self._request("POST", "/pause", params={"mode": mode}, timeout=timeout_seconds)

    def resume(self) -> None:
        self._request("POST", "/resume")

    def reload_weights(self, folder: str) -> None:
        """Fills the model from a folder that the server can read. A failure may leave it half filled."""
        self._request("POST", "/collective_rpc", json={"method": RELOAD_METHOD, "kwargs": {"weights_path": folder}})

    def reset_prefix_cache(self) -> None:
        if self._request("POST", "/reset_prefix_cache").get("success") is not True:
            raise ServerRefused(f"{self.url} did not reset its prefix cache: blocks are still in use")

    def set_weight_version(self, label: str) -> None:
        self._request("POST", "/update_weight_version", json={"new_version": label})
        reported = self.weight_version()
        if reported != label:
            raise ServerRefused(f"{self.url} was told weight version {label} and reports {reported}")

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The server's log-probabilities of tokens 1 … n - 1 given those before; works while it is paused."""
        body = {
            "request_id": f"{PROBE_MARK}-{uuid.uuid4().hex}",
            "token_ids": list(tokens),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
        }
        answer = self._request("POST", "/inference/v1/generate", json=body)
        return _logprobs_of(tokens, answer.get("prompt_logprobs") or [])

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise ServerRefused(f"{self.url}{path}: {response.status_code}: {response.text[:_ANSWER_CHARACTERS_MAX]}")
        return dict(response.json()) if response.content else {}


def _logprobs_of(tokens: Sequence[int], entries: Sequence[dict[str, dict[str, float]] | None]) -> list[float]:
    """vLLM answers a mapping from token id to log-probability per position, and nothing for the first."""
    if len(entries) != len(tokens):
        raise ServerRefused(f"the server gave {len(entries)} log-probabilities for {len(tokens)} tokens")
    found = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True) if entry]
    if len(found) != len(tokens) - 1:
        raise ServerRefused("the server left out the log-probability of some tokens")
    return found
