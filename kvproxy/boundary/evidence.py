"""Which form of snapshot serves a session better, by what its requests have shown.

A plain snapshot holds the slot as the answer left it: the prompt and the reply. A boundary snapshot ends
where the reply begins. Memory that can drop tokens at its end (full attention) makes as much of a plain one
whatever the client does with the reply, so it never pays for a boundary. Other memory (recurrent, hybrid,
sliding window; and unknown, until it is known) goes on from a plain snapshot only if the next prompt extends
all of it; if the client rewrites the reply, all is lost. A boundary loses the reply alone.

So the boundary is the form until a client is seen to send replies back as they were:

1. Full attention: plain.
2. The session's last three observations all extended everything: plain.
3. The session has rewritten a reply: boundary.
4. Else as the server's sessions do: plain if their last eight observations all extended everything.

One rewrite outweighs any number of extensions because it costs the whole prompt, and an extension saves the
computing of one reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

OWN_STREAK = 3
SERVER_STREAK = 8


class Form(StrEnum):
    PLAIN = "plain"
    BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True)
class Observation:
    """A request that met `stored` tokens of its session, resident or restored, in a slot or snapshot of the
    given `form`; of its `prompt` tokens `reused` were not computed."""

    form: Form
    stored: int
    reused: int
    prompt: int

    @property
    def tells(self) -> bool:
        """Whether it says what the client does with replies. Where the slot stood at a boundary, the reply
        was not there to be extended; a prompt half as long is a summary, or a side call."""
        return self.form is Form.PLAIN and 2 * self.prompt >= self.stored > 0

    @property
    def extends(self) -> bool:
        """Whether the prompt extended all that was stored."""
        # The last token of an answer is counted by some and is never in the slot.
        return self.reused + 1 >= self.stored


@dataclass(frozen=True, slots=True)
class Evidence:
    """The observations of a session, or of all sessions of a server, as far as they matter."""

    extensions: int = 0
    """In a row, up to the last observation."""
    has_rewritten: bool = False
    """A reply was rewritten, at any time."""

    def with_seen(self, observation: Observation) -> Evidence:
        if not observation.tells:
            return self
        if observation.extends:
            return replace(self, extensions=self.extensions + 1)
        return Evidence(0, has_rewritten=True)


def form_to_use(session: Evidence, server: Evidence, *, may_roll_back: bool) -> Form:
    """`may_roll_back`: the memory is known to drop tokens at its end, also after a restore."""
    if may_roll_back or session.extensions >= OWN_STREAK:
        return Form.PLAIN
    is_trusted = server.extensions >= SERVER_STREAK and not session.has_rewritten
    return Form.PLAIN if is_trusted else Form.BOUNDARY
