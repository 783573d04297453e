"""Run background work beside a chat without a file: `service_tier: flex`. Needs `pip install openai`.

Flex requests are scheduled as batch work: they use what the chats leave, and a chat never waits for them.
"""

import asyncio
import os
import time

from openai import AsyncOpenAI

URL = os.environ.get("TIDEMILL_URL", "http://127.0.0.1:8000")
COUNTRIES = ("France", "Italy", "Spain", "Japan")


async def main():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEMILL_API_KEY", "none"), timeout=600)
    model = (await client.models.list()).data[0].id

    async def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=60, **options
        )
        return answer.choices[0].message.content

    background = [
        asyncio.create_task(ask(f"What is the capital of {COUNTRIES[i % 4]}?", service_tier="flex")) for i in range(40)
    ]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    answer = await ask("What is tidemill?")
    print(f"chat, {time.monotonic() - began:.2f} s: {answer}")
    answers = await asyncio.gather(*background)
    print(f"background: {len(answers)} answers, such as {answers[0]!r}")
    await client.close()


asyncio.run(main())
