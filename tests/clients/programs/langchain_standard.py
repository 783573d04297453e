"""The standard tests of langchain-tests. Tests that ask for certain arguments or a joke go to the scripted model."""

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

COMMON: dict[str, Any] = {
    "model": "tidemill-demo",
    "base_url": os.environ["DEMO_URL"] + "/v1",
    "api_key": "none",
    "max_retries": 0,
}
PUPPET = {"model": "puppet", "base_url": os.environ["PUPPET_URL"] + "/v1"}
SCRIPTED = (
    "test_tool_calling[",
    "test_tool_calling_async",
    "test_unicode_tool_call",
    "test_structured_output_optional",
)


class TestChat(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.server = PUPPET if request.node.name.startswith(SCRIPTED) else {}

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**COMMON, **self.server, "temperature": 0, "max_tokens": 200, "stream_usage": True}


class TestResponses(TestChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True, "store": False}


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {**COMMON, "check_embedding_ctx_length": False}
