"""Client of one vLLM server's admin endpoints: pause, reload, version label, probe, resume.

Written for the HTTP interface of vLLM 0.32, with its development mode or with the plugin of consumers.vllm_endpoints.
"""

import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from replayground.schemas.errors import ReplaygroundError

# Copies of the names in consumers.vllm_scheduler and consumers.vllm_worker: importing those would import vLLM.
PROBE_MARK = "replayground-probe"
RELOAD_METHOD = "reload_weights_and_tied_head"
_ANSWER_CHARACTERS_MAX = 500


class ServerUnreachable(ReplaygroundError):
    """No connection to the server, or no response in time."""


class ServerRefused(ReplaygroundError):
    """The server responded, but did not confirm what it was asked to do."""


class VllmAdmin:
    """One server. Every call blocks until the server responds, at most `timeout_seconds`.

    Raises ServerUnreachable or ServerRefused; returning means that the server confirmed. Which weights it has is proven
    by prompt_logprobs alone.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        # vLLM closes a connection after an error, and a call on a kept connection would find it closed. trust_env: no
        # proxy of the environment may come between us and the server.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=timeout_seconds, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def healthy(self) -> bool:
        """Whether the server says that it is up; never raises."""
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
        """Returns when no turn is running and new ones are held back."""
        self._request("POST", "/pause", params={"mode": mode}, timeout=timeout_seconds)

    def resume(self) -> None:
        self._request("POST", "/resume")
        if self.is_paused():
            raise ServerRefused(f"{self.url} was resumed and still says that it is paused")

    def reload_weights(self, folder: str) -> None:
        """Loads weights from a folder that the server can read. A failure may leave the model partly loaded."""
        self._request("POST", "/collective_rpc", json={"method": RELOAD_METHOD, "kwargs": {"weights_path": folder}})

    def reset_prefix_cache(self, is_mid_turn: bool = False) -> None:
        """`is_mid_turn`: turns that a pause stopped in the middle give their cache up; what they have said is computed
        again when they go on."""
        params = {"reset_running_requests": is_mid_turn}
        # vLLM responds 200 with success=false while blocks are in use, so the status alone is not enough.
        if self._request("POST", "/reset_prefix_cache", params=params).get("success") is not True:
            raise ServerRefused(f"{self.url} did not reset its prefix cache: blocks are still in use")

    def set_weight_version(self, label: str) -> None:
        self._request("POST", "/update_weight_version", json={"new_version": label})
        # Read back: the reloader takes this label as the proof of what the server serves (P10).
        reported = self.weight_version()
        if reported != label:
            raise ServerRefused(f"{self.url} was given weight version {label} and reports {reported}")

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The server's log-probabilities of tokens 1 … n - 1 given those before; works while it is paused."""
        # prompt_logprobs 0 = of the given tokens only, without alternatives. vLLM does not accept max_tokens 0.
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
        try:
            return dict(response.json()) if response.content else {}
        except (ValueError, TypeError) as error:  # 200 from something that is no vLLM, such as a proxy's error page
            raise ServerRefused(
                f"{self.url}{path}: malformed response: {response.text[:_ANSWER_CHARACTERS_MAX]}"
            ) from error


def _logprobs_of(tokens: Sequence[int], entries: Sequence[dict[str, dict[str, float]] | None]) -> list[float]:
    """Picks the given tokens from vLLM's response: for each position but the first, a mapping by token id."""
    if len(entries) != len(tokens):
        raise ServerRefused(f"the server gave {len(entries)} log-probabilities for {len(tokens)} tokens")
    try:
        found = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True) if entry]
    except (KeyError, TypeError) as error:
        raise ServerRefused(f"the server's log-probabilities are malformed: {error!r}") from error
    if len(found) != len(tokens) - 1:
        raise ServerRefused("the server left out the log-probability of some tokens")
    return found
