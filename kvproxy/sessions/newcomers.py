"""Whether conversations that just began are worth keeping: pure.

Some clients only ever ask single questions: a batch job, a classifier. Each looks like a conversation that
began, and saving each would write gigabytes that nobody asks for again. A client that holds conversations
goes on with one of them before long. So once many have begun in a row of which none went on, the next ones
are not kept, until one does go on: that is seen without anything having been saved.
"""

from __future__ import annotations

MOST_UNCONTINUED = 32
"""Of those who open many chats before they continue one, nearly all open fewer."""


class Newcomers:
    def __init__(self) -> None:
        self._uncontinued = 0

    def began(self) -> bool:
        """Whether the conversation that began is not worth keeping until it goes on."""
        self._uncontinued += 1
        return self._uncontinued > MOST_UNCONTINUED

    def went_on(self) -> None:
        self._uncontinued = 0
