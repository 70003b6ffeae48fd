"""Built-in prompts of the demo: short tasks that a model of 135M parameters answers in whole sentences."""

from typing import NamedTuple


class Prompt(NamedTuple):
    """
    Attributes:
        kind (`str`): `"chat"`, `"code"` or `"math"`.
        text (`str`): The user's turn.
    """

    kind: str
    text: str


PROMPTS = [
    Prompt("chat", "How can I stay focused while I study?"),
    Prompt("chat", "What is the difference between weather and climate?"),
    Prompt("code", "Write a Python function that tells whether a string is a palindrome."),
    Prompt("code", "Write a JavaScript function that reverses a string."),
    Prompt("math", "What is the area of a rectangle that is 8 meters long and 5 meters wide?"),
    Prompt("math", "Solve the equation 3x + 5 = 20 step by step."),
]
