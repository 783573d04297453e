"""Label the rows of a CSV file: `python csv_to_labels.py reviews.csv labels.csv`. Needs `pip install openai`.

The input has the columns `id` and `text`. The output has `id`, `sentiment` and `reason`. A JSON schema makes every
answer valid; a row that failed has the sentiment "error" and the reason of the failure.
"""

import csv
import json
import os
import sys
import time

from openai import OpenAI

URL = os.environ.get("TIDEMILL_URL", "http://127.0.0.1:8000")
LINES = 50_000  # of a batch, at most
SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"type": "string", "enum": ["positive", "neutral", "negative"]},
        "reason": {"type": "string", "maxLength": 120},
    },
    "required": ["sentiment", "reason"],
    "additionalProperties": False,
}


def line(model, row):
    messages = [{"role": "user", "content": f"Is this review positive, neutral or negative?\n\n{row['text']}"}]
    form = {"type": "json_schema", "json_schema": {"name": "label", "schema": SCHEMA, "strict": True}}
    body = {"model": model, "messages": messages, "response_format": form, "max_tokens": 200}
    return {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}


def label(row):
    answer = row["response"]["body"]["choices"][0]
    if answer["finish_reason"] != "stop":
        return {"sentiment": "error", "reason": "the answer was cut off at max_tokens"}
    return json.loads(answer["message"]["content"])


def results(client, file_id):
    return map(json.loads, client.files.content(file_id).text.splitlines()) if file_id else ()


def main(source, target):
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEMILL_API_KEY", "none"))
    model = client.models.list().data[0].id
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    batches = []
    for start in range(0, len(rows), LINES):
        content = "\n".join(json.dumps(line(model, row)) for row in rows[start : start + LINES]).encode()
        uploaded = client.files.create(file=(f"reviews-{start}.jsonl", content), purpose="batch")
        batches.append(
            client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
        )
    labels = {}
    for batch in batches:
        while batch.status not in {"completed", "failed", "expired", "cancelled"}:
            time.sleep(1)
            batch = client.batches.retrieve(batch.id)
            counts = batch.request_counts
            print(f"{batch.id} {batch.status}: {counts.completed} of {counts.total}", file=sys.stderr)
        for row in results(client, batch.output_file_id):
            labels[row["custom_id"]] = label(row)
        for row in results(client, batch.error_file_id):
            failure = row["error"] or row["response"]["body"]["error"]
            labels[row["custom_id"]] = {"sentiment": "error", "reason": failure["message"]}
    with open(target, "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "sentiment", "reason"])
        writer.writeheader()
        for row in rows:  # in the order of the input
            writer.writerow({"id": row["id"], **labels.get(row["id"], {"sentiment": "error", "reason": "no result"})})


if __name__ == "__main__":
    main(*sys.argv[1:3])
