"""`tidemill chat`: chat with a running server in the terminal; answers are streamed."""

import sys
from contextlib import closing

from tidemill.client import ChatError, ChatOptions, ServerClient

_HELP = "/reset starts a new conversation, /exit leaves, Ctrl-C stops an answer."


def run_chat(options: ChatOptions) -> int:
    """Chat until /exit or the end of the input and return the exit code. Raise ChatError if there is no server."""
    client = ServerClient(options)
    model = options.model or client.first_model()
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        print(f"{model} at {options.url}. {_HELP}")
    while (line := _read_line("> " if interactive else "")) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(start)
                print("(a new conversation)")
            case "/help":
                print(_HELP)
            case _:
                messages = _exchange(client, model, [*messages, {"role": "user", "content": line}])
    return 0


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  # importing it gives `input` arrow keys and history
    except ImportError:
        return


def _read_line(prompt: str) -> str | None:
    """Read a line; return None at the end of the input. Ctrl-C discards the typed text."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print(f"\n{_HELP}")


def _exchange(client: ServerClient, model: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Print the answer to the last message and return the updated conversation.

    A stopped answer is kept as far as it arrived; a message whose request failed is removed.
    """
    pieces: list[str] = []
    with closing(client.stream(model, messages)) as stream:
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" (stopped)")
        except ChatError as error:
            print(f"\ntidemill: {error.message}" if pieces else f"tidemill: {error.message}", file=sys.stderr)
            return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(pieces)}] if pieces else messages[:-1]
