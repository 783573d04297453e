"""Compute vectors of many texts by a batch, and print the nearest pair. Needs `pip install openai`."""

import itertools
import json
import os
import time

from openai import OpenAI

URL = os.environ.get("TIDEMILL_URL", "http://127.0.0.1:8000")
TEXTS = ["The river rises in spring.", "A boat lies at the pier.", "The river rises in March.", "Bread needs salt."]

client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEMILL_API_KEY", "none"))
model = client.models.list().data[0].id
lines = [
    {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": model, "input": text}}
    for i, text in enumerate(TEXTS)
]
content = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("texts.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
while batch.status not in {"completed", "failed", "expired", "cancelled"}:
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)

vectors = {}
for row in map(json.loads, client.files.content(batch.output_file_id).text.splitlines()):
    vectors[int(row["custom_id"])] = row["response"]["body"]["data"][0]["embedding"]


def similarity(pair):
    """Return the cosine of two vectors: their product, because they have length 1."""
    first, second = pair
    return sum(a * b for a, b in zip(vectors[first], vectors[second], strict=True))


first, second = max(itertools.combinations(sorted(vectors), 2), key=similarity)
print(f"{similarity((first, second)):.3f}: {TEXTS[first]!r} and {TEXTS[second]!r}")
