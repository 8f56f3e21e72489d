"""Headers that name a session: those of each client, their precedence, and those that an operator adds."""

from __future__ import annotations

import pytest

from router.serving.reading.sessions import NO_SESSION, Session, SessionHeaders


@pytest.mark.parametrize(
    ("sent", "session"),
    [
        # Dynamo: https://docs.nvidia.com/dynamo/dev/agents/identify-agent-sessions
        ({"x-dynamo-session-id": "d"}, Session("d", "")),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, Session("d", "p")),
        # "When X-Dynamo-Session-ID is present, Dynamo uses it ... instead of any agent-native identity values."
        ({"session-id": "c", "x-dynamo-session-id": "d", "x-parent-session-id": "p"}, Session("d", "")),
        # OpenCode: packages/opencode/src/session/llm.ts. FastDeploy's clients use the first one, too.
        ({"x-session-id": "o"}, Session("o", "")),
        ({"x-session-id": "o", "x-parent-session-id": "p"}, Session("o", "p")),
        # Claude Code, as in Dynamo's table: agents of a session name the session, agents of agents the agent.
        ({"x-claude-code-session-id": "s"}, Session("s", "")),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, Session("a", "s")),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "b",
            },
            Session("a", "b"),
        ),
        # Codex: codex-rs/core/src/client.rs
        ({"session-id": "c"}, Session("c", "")),
        # A header without a value names nothing.
        ({"x-session-id": "", "session-id": "c"}, Session("c", "")),
        ({"x-parent-session-id": "p", "x-other": "x"}, NO_SESSION),
    ],
)
def test_each_clients_headers_name_its_session(sent: dict[str, str], session: Session) -> None:
    headers = [(name.encode(), value.encode()) for name, value in sent.items()]
    assert SessionHeaders().find_session(headers) == session


def test_an_operators_headers_precede_the_known_ones() -> None:
    table = SessionHeaders(["X-Chat:X-Parent-Chat", "x-thread"])
    headers = [(b"x-dynamo-session-id", b"d"), (b"x-thread", b"t"), (b"x-chat", b"c"), (b"x-parent-chat", b"p")]
    assert table.find_session(headers) == Session("c", "p")
    assert table.find_session(headers[:2]) == Session("t", "")
    assert table.find_session(headers[:1]) == Session("d", "")
