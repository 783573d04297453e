"""POST /v1/messages: Anthropic's API as used by its SDK and Claude Code, translated to chat requests."""
