"""POST /v1/responses, stateless: OpenAI's newer API as its SDK and Codex use it, translated into a chat request."""
