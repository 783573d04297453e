"""Let the model call a function and answer with its result. Needs `pip install openai`."""

import json
import os

from openai import OpenAI

URL = os.environ.get("TIDEMILL_URL", "http://127.0.0.1:8000")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def get_weather(city):
    return {"Seoul": "fog, 7 degrees"}.get(city, "sun, 20 degrees")


client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("TIDEMILL_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "How is the weather in Seoul?"}]
while True:
    answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], temperature=0)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
