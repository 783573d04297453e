"""Run a batch of four lines. Needs `pip install openai`."""

import json
import os
import time

from openai import OpenAI

URL = os.environ.get("TIDEMILL_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEMILL_API_KEY", "none"))
model = client.models.list().data[0].id

lines = []
for country in ("France", "Italy", "Spain", "Japan"):
    question = [{"role": "user", "content": f"What is the capital of {country}?"}]
    body = {"model": model, "messages": question, "temperature": 0}
    lines.append({"custom_id": country, "method": "POST", "url": "/v1/chat/completions", "body": body})

content = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("capitals.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in {"completed", "failed", "expired", "cancelled"}:
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)

if batch.output_file_id:
    for row in map(json.loads, client.files.content(batch.output_file_id).text.splitlines()):
        print(row["custom_id"], "->", row["response"]["body"]["choices"][0]["message"]["content"])
