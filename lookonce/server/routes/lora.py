"""Routes that load and unload LoRA adapters while the server runs, as vLLM's do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lookonce.config import LORA_NAME, LoRAConfig
from lookonce.errors import BadRequestError, ForbiddenError
from lookonce.server.audit import audit
from lookonce.server.http.api_keys import Principal
from lookonce.server.http.body import receive
from lookonce.server.services import Services


class LoadLoRAAdapterRequest(msgspec.Struct):
    lora_name: str
    lora_path: str
    """Of a folder beneath `--lora-dir`, absolute or relative to it."""
    load_inplace: bool = False
    """Another adapter of this name is replaced; requests that run go on with that one."""


class UnloadLoRAAdapterRequest(msgspec.Struct):
    lora_name: str
    lora_int_id: int | None = None
    """vLLM's number; it means nothing here."""


async def load_lora_adapter(request: Request) -> Response:
    """Needs an admin key where there are keys, and `--lora-dir`."""
    services, config = _permitted(request)
    body = await receive(request, LoadLoRAAdapterRequest)
    if not LORA_NAME.fullmatch(body.lora_name):
        raise BadRequestError(
            "lora_name takes 1 to 128 letters, digits and . _ : / @ -, the first a letter or digit",
            param="lora_name",
        )
    if body.lora_name == services.config.model.served_name:
        raise BadRequestError("lora_name is the name of the model", param="lora_name")
    path = await asyncio.to_thread(_checked_folder, body.lora_path, config)
    await services.engine.load_adapter(body.lora_name, path, replace=body.load_inplace)
    audit("lora_loaded", request.scope, adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Requests that run with the adapter go on. Needs what loading needs."""
    services, _ = _permitted(request)
    body = await receive(request, UnloadLoRAAdapterRequest)
    await services.engine.unload_adapter(body.lora_name)
    audit("lora_unloaded", request.scope, adapter=body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _permitted(request: Request) -> tuple[Services, LoRAConfig]:
    """Raises `ForbiddenError`."""
    services: Services = request.app.state.services
    principal: Principal = request.state.principal
    principal.require_admin()
    config = services.config.lora
    if config is None or config.folder is None:
        raise ForbiddenError(
            "adapters are not loaded or unloaded while this server runs: it was started without "
            "--lora-dir"
        )
    return services, config


def _checked_folder(path: str, config: LoRAConfig) -> str:
    """The real path of a folder beneath `--lora-dir`. One that does not exist and one that lies
    elsewhere are refused alike: nobody learns what there is."""
    root = Path(config.folder or "")
    try:
        found = (root / path).resolve()
        inside = found != root and found.is_relative_to(root) and found.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, or links in a circle
        inside = False
    if not inside:
        raise BadRequestError(
            "lora_path is no folder beneath the one of --lora-dir", param="lora_path"
        )
    return str(found)
