"""/v1/uploads: upload a large file in parts. A part gets its 200 once its body and its database row are durable.

Each part is stored as a file with the purpose PART and the upload's id as its name. So quotas, expiry and recovery
treat it like a file, and a crash loses no acknowledged part.
"""

import hashlib
from typing import Annotated

import anyio
from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from gateway.batch.files import DEFAULT_EXPIRY, PIECE_BYTES, FileExpiry, quota_reached, receive, room, store_file
from gateway.batch.limits import BatchState, state_of
from gateway.batch.listing import json_response
from gateway.batch.uploads import MAX_FILENAME_CHARS
from gateway.context import context_of, tenant_of
from gateway.generate.answering import read_json
from gateway.generate.validation import StrictBody, at_most, parse_json, validate
from gateway.http.errors import ApiError
from gateway.store.disk import DiskFile, StorageError, UnreadableError, read_errors
from gateway.store.objects import (
    PART,
    UPLOAD_ID,
    FileObject,
    StorageQuota,
    UploadObject,
    UploadStatus,
    WrongPart,
    new_file_id,
    new_upload_id,
)

router = APIRouter()

UPLOAD_SECONDS = 3600
"""Time for all parts of an upload, as in OpenAI's API."""
MAX_PART_BYTES = 64 * 1024 * 1024
MAX_PARTS = 4096

_Md5 = Annotated[str, StringConstraints(pattern="^[0-9a-fA-F]{32}$")]


class UploadRequest(StrictBody):
    """POST /v1/uploads."""

    filename: Annotated[str, StringConstraints(min_length=1, max_length=MAX_FILENAME_CHARS)]
    purpose: str
    bytes: int = Field(ge=1)
    mime_type: Annotated[str, StringConstraints(max_length=255)] = ""
    expires_after: FileExpiry | None = None


class CompleteRequest(StrictBody):
    """POST /v1/uploads/{upload_id}/complete."""

    part_ids: Annotated[list[str], at_most(MAX_PARTS)]
    md5: _Md5 | None = None


def _body(model: type[StrictBody]) -> dict[str, object]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


@router.post("/v1/uploads", openapi_extra=_body(UploadRequest))
async def create_upload(request: Request) -> Response:
    context_of(request).lifecycle.check_accepting()
    state = state_of(request)
    body = await read_json(request, lambda raw: validate(UploadRequest, parse_json(raw)))
    if body.purpose != "batch":
        raise ApiError(400, "'purpose' must be 'batch'.", param="purpose", code="invalid_value")
    if body.bytes > state.limits.file_bytes:
        raise ApiError(413, f"The file is larger than {state.limits.file_bytes} bytes.", param="bytes")
    now = state.now()
    upload = UploadObject(
        new_upload_id(),
        tenant_of(request),
        body.bytes,
        now,
        now + UPLOAD_SECONDS,
        body.filename,
        DEFAULT_EXPIRY if body.expires_after is None else body.expires_after.seconds,
    )
    await state.folder.store.add_upload(upload)
    return json_response(upload.as_json(now))


@router.post(
    "/v1/uploads/{upload_id}/parts",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["data"],
                        "properties": {"data": {"type": "string", "format": "binary"}},
                    }
                }
            },
        }
    },
)
async def add_part(request: Request, upload_id: str) -> Response:
    context_of(request).lifecycle.check_accepting()
    state, upload = state_of(request), await _pending(request, upload_id)
    quota = context_of(request).keys.quota(upload.tenant).bytes
    async with state.uploads.place(upload.tenant):
        most = min(MAX_PART_BYTES, upload.bytes, await room(request, quota))
        temp = await to_thread.run_sync(state.folder.create_temp)
        try:
            await receive(request, temp, most, "data")
            now = state.now()
            part = FileObject(new_file_id(), upload.tenant, temp.size, now, upload.id, PART, upload.expires_at)
            await store_file(state, temp, part, quota)
        except StorageQuota as error:
            assert quota is not None
            raise quota_reached(quota, error.used) from None
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(temp.discard)
    part_id = part.id.replace("file-", "part_")
    return json_response({"id": part_id, "object": "upload.part", "created_at": now, "upload_id": upload.id})


@router.post("/v1/uploads/{upload_id}/complete", openapi_extra=_body(CompleteRequest))
async def complete_upload(request: Request, upload_id: str) -> Response:
    """Join the parts in the given order. The parts stay until the file is durable, so the request can be repeated."""
    state = state_of(request)
    body = await read_json(request, lambda raw: validate(CompleteRequest, parse_json(raw)))
    upload = await _find(request, upload_id)
    if upload.status is not UploadStatus.COMPLETED:
        upload = await _pending(request, upload_id)
        ids = [part_id.replace("part_", "file-") for part_id in body.part_ids]
        temp = await to_thread.run_sync(state.folder.create_temp)
        try:
            await _join(state, upload, ids, body.md5, temp)
        except WrongPart as error:
            raise ApiError(400, str(error), param="part_ids", code="invalid_value") from None
        except UnreadableError:
            message = "A stored part is damaged; create a new upload."
            raise ApiError(500, message, code="file_damaged", headers={"x-should-retry": "false"}) from None
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(temp.discard)
        upload = await _find(request, upload_id)
    return await _shown(request, upload)


async def _join(state: BatchState, upload: UploadObject, ids: list[str], md5: str | None, temp: DiskFile) -> None:
    """Write the parts to `temp` and make it the upload's file. Raises WrongPart, ApiError and StorageError."""
    sizes = await state.folder.store.part_sizes(upload, ids)
    if sum(sizes) != upload.bytes:
        message = f"The parts have {sum(sizes)} bytes, the upload {upload.bytes}; send and name all parts."
        raise ApiError(400, message, param="part_ids", code="invalid_value")
    digest = hashlib.md5(usedforsecurity=False)
    for part_id, size in zip(ids, sizes, strict=True):
        await to_thread.run_sync(_append, state, part_id, size, temp, digest if md5 else None)
    if md5 is not None and digest.hexdigest() != md5.lower():
        message = "The md5 of the parts differs from 'md5'; send the damaged part again."
        raise ApiError(400, message, param="md5", code="invalid_value")
    now = state.now()
    file = FileObject(new_file_id(), upload.tenant, temp.size, now, upload.filename, "batch", now + upload.file_seconds)
    await state.folder.store.announce_files([file.id])
    try:
        await to_thread.run_sync(state.folder.publish_files, (temp, file.id))
        unused = await state.folder.store.complete_upload(upload.id, file, now)
    except (StorageError, WrongPart) as error:
        await state.folder.withdraw(error, file.id)
        raise
    await _remove_bodies(state, unused)


def _append(state: BatchState, part_id: str, size: int, temp: DiskFile, digest: "hashlib._Hash | None") -> None:
    path = state.folder.copy_body(part_id)
    with read_errors(path), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            if digest is not None:
                digest.update(piece)
            size -= len(piece)
            with state.folder.disk.storing():
                temp.write(piece)
        if size:
            raise EOFError("the stored part is shorter than recorded in the database")


@router.post("/v1/uploads/{upload_id}/cancel")
async def cancel_upload(request: Request, upload_id: str) -> Response:
    state, upload = state_of(request), await _pending(request, upload_id)
    await _remove_bodies(state, await state.folder.store.cancel_upload(upload.id, state.now()))
    return await _shown(request, await _find(request, upload_id))


async def _remove_bodies(state: BatchState, file_ids: list[str]) -> None:
    """Remove the bodies of parts; if that fails, the cleanup of deleted files removes them later."""
    for file_id in file_ids:
        try:
            await to_thread.run_sync(state.folder.remove_body, file_id)
        except StorageError:
            return


async def _find(request: Request, upload_id: str) -> UploadObject:
    upload = None
    if UPLOAD_ID.fullmatch(upload_id):
        upload = await state_of(request).folder.store.get_upload(tenant_of(request), upload_id)
    if upload is None:
        raise ApiError(404, "The upload does not exist.", param="upload_id", code="upload_not_found")
    return upload


async def _pending(request: Request, upload_id: str) -> UploadObject:
    """Return an upload that takes parts. Raises ApiError 404, and 400 for one that has ended or expired."""
    upload = await _find(request, upload_id)
    status = upload.status_at(state_of(request).now())
    if status is not UploadStatus.PENDING:
        message = f"The upload is {status.value}; create a new one."
        raise ApiError(400, message, param="upload_id", code="invalid_value")
    return upload


async def _shown(request: Request, upload: UploadObject) -> Response:
    state, file = state_of(request), None
    if upload.file_id is not None:
        file = await state.folder.store.get_file(upload.tenant, upload.file_id, state.now())
    return json_response(upload.as_json(state.now(), file))
