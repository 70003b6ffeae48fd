"""Built-in prompts of the demo."""

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
    Prompt("chat", "Give me three tips for sleeping better."),
    Prompt("chat", "What should I think about before I adopt a dog?"),
    Prompt("code", "Write a Python function that tells whether a string is a palindrome."),
    Prompt("code", "Write a SQL query that lists the ten customers who spent the most money last year."),
    Prompt("math", "A train travels 180 km in 2 hours and 15 minutes. What is its average speed in km per hour?"),
    Prompt("math", "Tom has 24 apples. He gives a third of them to Anna and eats two. How many apples are left?"),
]
