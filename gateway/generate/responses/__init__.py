"""POST /v1/responses, stateless: OpenAI's newer API as used by its SDK and Codex, translated to chat requests."""
