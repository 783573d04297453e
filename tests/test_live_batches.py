"""A real batch job on the packaged demo model, beside a chat."""

import asyncio
from pathlib import Path
from typing import Any

from batch_tools import FAST, check_ended, client_of, jsonl, line, open_folder, submit, until, until_counted
from fake_engine import demo_engine, serve
from integrity import check_core

MODEL = "tidemill-demo"
BLOCKS = 80


async def test_the_second_turn_of_a_chat_hits_its_prefix_after_a_batch_job(tmp_path: Path) -> None:
    """The job's lines fill the cache several times over, and are still running when the second turn comes."""
    engine, tokenizer = demo_engine(num_gpu_blocks_override=BLOCKS, max_num_seqs=16)
    folder = await open_folder(tmp_path / "state")
    options: dict[str, Any] = {"served_model_name": (MODEL,), "folder": folder, "batch_limits": FAST}
    server = serve(engine, tokenizer, **options)
    async with server as served, client_of(served, timeout=120) as client:
        turns = [{"role": "user", "content": "Tell me about the tide. " * 12 + "What is tidemill?"}]

        async def ask() -> tuple[str, int, int]:
            answer = await client.chat.completions.create(
                model=MODEL, messages=turns, temperature=0, max_tokens=20  # type: ignore[arg-type]
            )  # fmt: skip
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached

        text, prompt, cached = await ask()
        assert cached == 0
        lines = [
            line(i, model=MODEL, prompt=[7 + i % 50, i // 50] * 30, max_tokens=8, ignore_eos=True) for i in range(200)
        ]
        batch = await submit(client, jsonl(lines))
        await until_counted(client, batch.id, 100)
        assert 4 * BLOCKS < 100 * 68 // 16
        turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thanks! What is TTFT?"}]
        _, _, cached = await ask()
        assert cached >= (prompt - 1) // 16 * 16
        ended = await until(client, batch.id)
        await check_ended(client, ended, [f"id-{i}" for i in range(200)])
        assert ended.usage.output_tokens == 200 * 8
    await asyncio.to_thread(check_core, engine.core)
