"""Where clients name their conversation: the known headers and fields of the body, and what is none.

In the order in which they are believed: first what means one conversation and nothing else, last what is
shared by sub-agents or by a whole installation. All of them only say where to look; the content of a request
decides which branch it belongs to.
"""

from __future__ import annotations

PATTERN = "x-*-session-id"
"""Stands for every header of that form with a fit value; off unless it is listed."""

HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "x-codex-turn-metadata",
    "x-session-affinity",
    "x-opencode-session",
    "x-kilo-session",
    "x-deepseek-harness-session-id",
    "agent-session-id",
    "x-openwebui-chat-id",
    "x-conversation-id",
    "x-litellm-session-id",
    "x-affinity",
    "x-grok-conv-id",
    "x-amp-thread-id",
    "x-task-id",
    "x-roo-task-id",
    "x-dynamo-session-id",
    "helicone-session-id",
    "session-id",
    "session_id",
    "conversation_id",
)

BODY_FIELDS = (
    "session_id",
    "litellm_session_id",
    "client_metadata.thread_id",
    "client_metadata.session_id",
    "metadata.session_id",
    "metadata.sessionId",
    "metadata.conversation_id",
    "metadata.thread_id",
    "conversation",
    "conversation.id",
    "metadata.user_id",
    "prompt_cache_key",
)
"""Names of objects and keys in them, joined by dots."""

NOT_IDENTITY = {
    "authorization": "a credential",
    "proxy-authorization": "a credential",
    "cookie": "a credential",
    "x-api-key": "a credential",
    "api-key": "a credential",
    "user-agent": "an application",
    "originator": "an application",
    "referer": "an application",
    "http-referer": "an application",
    "x-title": "an application",
    "x-forwarded-for": "a machine",
    "forwarded": "a machine",
    "x-real-ip": "a machine",
    "x-user-id": "a person",
    "x-user-email": "a person",
    "x-forwarded-user": "a person",
    "x-forwarded-email": "a person",
    "x-openwebui-user-id": "a person",
    "x-openwebui-user-name": "a person",
    "x-openwebui-user-email": "a person",
    "x-openwebui-user-role": "a person",
    "x-deepseek-harness-user-id": "a person",
    "x-gemini-api-privileged-user-id": "a person",
    "x-codex-installation-id": "a machine",
    "vscode-sessionid": "a window",
    "vscode-machineid": "a machine",
    "x-request-id": "a request",
    "x-opencode-request": "a request",
    "idempotency-key": "a request",
    "x-litellm-call-id": "a request",
    "x-interaction-id": "a turn",
    "x-agent-task-id": "a turn",
    "x-claude-code-prompt-id": "a turn",
    "x-openwebui-message-id": "a message",
    "x-codex-window-id": "a conversation between two compactions",
    "x-claude-code-agent-id": "an agent within a conversation, for which it is read already",
    "x-parent-session-id": "another conversation: its parent",
    "x-codex-parent-thread-id": "another conversation: its parent",
    "x-claude-code-parent-agent-id": "another agent: its parent",
    "x-litellm-trace-id": "a trace",
    "traceparent": "a trace",
    "tracestate": "a trace",
    "helicone-session-path": "a trace",
    "mcp-session-id": "a connection to a tool server",
    "x-codex-turn-state": "a token of the client's own",
}
"""Headers that must not be listed, and what each of them means instead of a conversation."""
