"""Endpoints of a vLLM server that the reloader needs, as a plugin of vLLM (entry point group `vllm.endpoint_plugins`).

vLLM has them in its development mode alone, beside one that calls any method of its workers. With `VLLM_PLUGINS=replayground`
a server has these and no others: pause, resume, reset of the prefix cache, version label, and one reload method.
Imported inside vLLM only.
"""

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from vllm.entrypoints.rl.online.api_router import router as weight_router
from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router

# The same as in consumers.vllm_admin: this file is loaded in servers that do without the rest.
RELOAD_METHOD = "reload_weights_and_tied_head"
PATHS = ("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/update_weight_version", "/weight_info")
"vLLM's own endpoints, taken over as they are"

_router = APIRouter()


class WeightEndpoints:
    """See vllm.plugins.endpoint_plugins.interface.EndpointPlugin."""

    name = "replayground"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        found = [
            route
            for router in (weight_router, cache_router)
            for route in router.routes
            if isinstance(route, APIRoute) and route.path in PATHS
        ]
        # Another release of vLLM: better no server than one that cannot be paused.
        assert {route.path for route in found} == set(PATHS), "this release of vLLM has other endpoints"
        app.router.routes.extend(found)
        app.include_router(_router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Nothing: the routes find the engine in the state of the app."""


@_router.post("/collective_rpc")
async def reload_weights(request: Request) -> dict[str, Any]:
    """The endpoint of the development mode, for one method."""
    body = await request.json()
    if not isinstance(body, dict) or body.get("method") != RELOAD_METHOD:
        raise HTTPException(403, f"only {RELOAD_METHOD} may be called")
    folder = str(body.get("kwargs", {}).get("weights_path", ""))
    client = request.app.state.engine_client
    await client.collective_rpc(method=RELOAD_METHOD, kwargs={"weights_path": folder})
    return {"results": []}
