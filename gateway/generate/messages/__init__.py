"""POST /v1/messages: Anthropic's API as its SDK and Claude Code use it, translated into a chat request."""
