"""Stop strings: found while text streams, and never shown too early.

The match that ends first in the text stops it; of those that end at the same character, the longest. All stop
strings are searched at once by an Aho-Corasick automaton: its state after a text is the longest end of the
text that begins a stop string, which is both what must be held back and where the next character continues.
Source: A. Aho, M. Corasick, "Efficient string matching", CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """States are the prefixes of the stop strings, numbered; 0 is the empty one.

    Attributes:
        held: per state, characters at the end of the text that may yet become a stop string.
        match: per state, the longest stop string the text now ends with, or "".
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        children: list[dict[str, int]] = [{}]
        depth = [0]
        self.match = [""]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in children[state]:
                    children[state][char] = len(children)
                    children.append({})
                    depth.append(depth[state] + 1)
                    self.match.append("")
                state = children[state][char]
            self.match[state] = stop
        # Breadth first: a state's failure (its longest proper end that is a state) is shallower, so known.
        fail = [0] * len(children)
        self.held = [0] * len(children)
        queue = deque([0])
        while queue:
            state = queue.popleft()
            self.held[state] = depth[state] if children[state] else self.held[fail[state]]
            self.match[state] = self.match[state] or self.match[fail[state]]
            for char, child in children[state].items():
                fall = fail[state]
                while fall and char not in children[fall]:
                    fall = fail[fall]
                fail[child] = children[fall].get(char, 0) if state else 0
                queue.append(child)
        self._children = children
        self._fail = fail

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        children = self._children
        while state and char not in children[state]:
            state = self._fail[state]
        return children[state].get(char, 0)


@lru_cache(maxsize=256)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; requests often share them."""
    return StopAutomaton(stops)


class StopChecker:
    """Passes one growing text through, up to a stop string.

    Args:
        stops: non-empty stop strings.
        include_stop: the stop string is part of the text. Nothing is ever held back then: what follows a
            stop string only arrives together with its last character or later.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._automaton = stop_automaton(stops)
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.stop: str | None = None  # the one that matched

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The text that may be shown now. After a match, which sets `stop`, nothing more comes.

        Args:
            text: new text.
            may_stop: False while min_tokens forbids stopping: a stop string that ends in this text is text.
        """
        if self.stop is not None:
            return ""
        automaton = self._automaton
        state = self._state
        for place, char in enumerate(text):
            state = automaton.step(state, char)
            if may_stop and automaton.match[state]:
                self.stop = automaton.match[state]
                whole = self._held + text[: place + 1]
                self._held = ""
                return whole if self._include else whole[: -len(self.stop)]
        self._state = state
        if self._include:
            return text
        whole = self._held + text
        cut = len(whole) - automaton.held[state]
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """At the end: the text that was held back, if no stop string matched."""
        held, self._held = self._held, ""
        return held
