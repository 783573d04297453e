"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: LoRA adapters that come and go while the
server runs, for operators. With a state folder they are loaded again at the next start."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.adapters import AdapterFiles, allowed_folder, is_name, stamp_of
from engine.api import EngineClient
from engine.errors import ConfigError, InvalidRequestError, TidemillError
from gateway.context import context_of, sees_all
from gateway.generate.answering import read_json
from gateway.generate.wire import StrictBody, parse_json, validate
from gateway.http.errors import ApiError
from gateway.models import ModelNames
from gateway.store.folder import StateFolder

log = logging.getLogger("tidemill.gateway")

router = APIRouter()


class LoadBody(StrictBody):
    """`lora_path`: in the server's --allowed-lora-dir, or absolute."""

    lora_name: str
    lora_path: str


class UnloadBody(StrictBody):
    """`lora_int_id` is vLLM's number of it, and without effect."""

    lora_name: str
    lora_int_id: int | None = None


class LoadedAdapters:
    """The adapters that came while the server ran; as work in the background it loads those of the last time again.
    They are changed one at a time."""

    def __init__(self, client: EngineClient, models: ModelNames, folder: StateFolder | None) -> None:
        self._client, self._models, self._folder = client, models, folder
        self._loaded: dict[str, AdapterFiles] = {}
        self._kept: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self._last_number = 0

    async def start(self) -> None:
        """See BackgroundWork. What cannot be had is said, and tried again at the next start."""
        self._kept = await asyncio.to_thread(self._read)
        for name, path in self._kept.items():
            try:
                await self._take(name, path)
            except TidemillError as error:
                log.error("adapter %s is not loaded again: %s", name, error)

    async def stop(self) -> None:
        """See BackgroundWork."""

    async def load(self, name: str, path: str) -> None:
        """Take an adapter. Raises ApiError, and EngineUnavailableError."""
        if not is_name(name):
            message = "'lora_name' must be of letters, digits, '.', '_', '-', '/', and begin with a letter or a digit."
            raise ApiError(400, message, param="lora_name", code="invalid_value")
        async with self._changing:
            try:
                await self._take(name, path)
            except ConfigError as error:
                raise ApiError(400, error.message, param="lora_path", code="invalid_adapter") from None
            await self._keep(self._kept | {name: path})

    async def _take(self, name: str, path: str) -> None:
        self._models.check_free(name)
        folder = await asyncio.to_thread(allowed_folder, self._client.info.adapter_dir, path)
        try:
            stamp = await asyncio.to_thread(stamp_of, folder)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        # a number that no adapter had, in no start of the server: a cache on a disk outlives it
        self._last_number = max(self._last_number + 1, time.time_ns())
        adapter = AdapterFiles(self._last_number, name, str(folder), stamp)
        await self._client.load_adapter(adapter)
        self._models.add(name, adapter.number)
        self._loaded[name] = adapter

    async def unload(self, name: str) -> None:
        """Give one up: no new request finds it. Raises ApiError, 409 while something uses it, and
        EngineUnavailableError."""
        async with self._changing:
            adapter = self._loaded.get(name)
            if adapter is None and name not in self._kept:
                message = f"No adapter '{name}' was loaded while the server ran; those of --lora stay."
                raise ApiError(404, message, param="lora_name", code="adapter_not_found")
            if adapter is not None:
                await self._give_up(adapter)
            await self._keep({kept: path for kept, path in self._kept.items() if kept != name})

    async def _give_up(self, adapter: AdapterFiles) -> None:
        batches = [] if self._folder is None else await self._folder.store.unfinished_batches()
        for batch in batches:
            model = None if batch.model is None else self._models.find(batch.model)
            if model is not None and model.adapter == adapter.number:
                message = f"The batch {batch.id} names this adapter, and has not ended."
                raise ApiError(409, message, param="lora_name", code="adapter_in_use")
        self._models.remove(adapter.name)
        try:
            await self._client.unload_adapter(adapter.number)
        except BaseException as error:
            self._models.add(adapter.name, adapter.number)
            if isinstance(error, InvalidRequestError):
                raise ApiError(409, error.message, param=error.param, code=error.code) from None
            raise
        del self._loaded[adapter.name]

    # What the next start loads again

    def _read(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        path = _file(self._folder)
        try:
            return {str(name): str(where) for name, where in orjson.loads(path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, orjson.JSONDecodeError, AttributeError) as error:
            log.error("adapters of the last start are not known: %s: %s", path, error)
            return {}

    async def _keep(self, kept: dict[str, str]) -> None:
        self._kept = kept
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(_write, self._folder, orjson.dumps(kept))
        except OSError as error:
            log.error("the next start will not know of a change of adapters: %s", error)


def _file(folder: StateFolder) -> Path:
    return folder.root / "adapters.json"


def _write(folder: StateFolder, content: bytes) -> None:
    temporary = folder.root / "tmp" / token_hex(16)
    try:
        temporary.touch(mode=0o600)
        temporary.write_bytes(content)
        temporary.replace(_file(folder))
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _body(body: type[StrictBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}


def _adapters(request: Request) -> LoadedAdapters:
    """Raises ApiError 403 for a key without the role, and where adapters are fixed."""
    if not sees_all(request):
        message = "A key needs the role 'metrics' or 'operator' to change adapters."
        raise ApiError(403, message, code="adapters_forbidden")
    if not context_of(request).client.info.adapter_dir:
        message = "Adapters do not change while this server runs: it was started without --allowed-lora-dir."
        raise ApiError(403, message, code="adapters_fixed")
    adapters: LoadedAdapters = request.app.state.adapters
    return adapters


async def _change(request: Request, body: type[StrictBody], work: Callable[[LoadedAdapters, Any], Any]) -> None:
    context_of(request).lifecycle.check_accepting()
    adapters = _adapters(request)
    await work(adapters, await read_json(request, lambda raw: validate(body, parse_json(raw))))


@router.post("/v1/load_lora_adapter", openapi_extra=_body(LoadBody))
async def load_lora_adapter(request: Request) -> Response:
    await _change(request, LoadBody, lambda adapters, body: adapters.load(body.lora_name, body.lora_path))
    return PlainTextResponse("Success: the LoRA adapter is loaded.")


@router.post("/v1/unload_lora_adapter", openapi_extra=_body(UnloadBody))
async def unload_lora_adapter(request: Request) -> Response:
    await _change(request, UnloadBody, lambda adapters, body: adapters.unload(body.lora_name))
    return PlainTextResponse("Success: the LoRA adapter is unloaded.")
