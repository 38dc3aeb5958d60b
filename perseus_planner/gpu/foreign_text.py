"""Text that comes from outside, a command or a daemon, made fit to be quoted in an error."""

from __future__ import annotations


def one_line(text: str, most: int = 300) -> str:
    """The end of `text`, at most so many characters, on one line of printable ones."""
    words = "".join(character if character.isprintable() else " " for character in text).split()
    line = " ".join(words)
    return line if len(line) <= most else f"…{line[1 - most :]}"
