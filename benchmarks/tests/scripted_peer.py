"""A server with OpenAI's completions that stands for another engine: `python scripted_peer.py PORT`.

It answers with as many words as were asked for; a prompt that begins with "short" gets one less. /seen has the bodies
of all requests, /metrics what vLLM calls its open requests.
"""

import sys

import orjson
from aiohttp import web

BODIES = web.AppKey("bodies", list[dict[str, object]])
METRICS = "vllm:num_requests_running{engine='0'} 0\nvllm:num_requests_waiting{engine='0'} 0\n"


async def complete(request: web.Request) -> web.StreamResponse:
    body = orjson.loads(await request.read())
    request.app[BODIES].append(body)
    count = body["max_tokens"] - body["prompt"].startswith("short")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(count):
        await response.write(b"data: " + orjson.dumps({"choices": [{"index": 0, "text": " word"}]}) + b"\n\n")
    usage = {"prompt_tokens": 1 + body["prompt"].count(" "), "completion_tokens": count}
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}
    await response.write(b"data: " + orjson.dumps(end) + b"\n\ndata: [DONE]\n\n")
    return response


async def seen(request: web.Request) -> web.Response:
    return web.Response(body=orjson.dumps(request.app[BODIES]))


async def page(request: web.Request) -> web.Response:
    return web.Response(text=METRICS if request.path == "/metrics" else "ok")


if __name__ == "__main__":
    app = web.Application()
    app[BODIES] = []
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/seen", seen)
    app.router.add_get("/health", page)
    app.router.add_get("/metrics", page)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
