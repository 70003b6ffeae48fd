"""
A made-up language of which it is known how much a wrong word spoils.

A clause of the source is a pivot and two versions of three words: `p x1 x2 x3 y1 y2 y3`. The speaker translates the
pivot by one of its two synonyms, with equal chance, and then the first version after the one synonym and the second
after the other. Nobody can know the synonym, so half of its guesses are rejected. How many words the versions share
decides what the target, verifying a wrong guess, can say about the words that follow: with all of them shared the
rejected branch re-converges, with none it does not.
"""

import random
from dataclasses import dataclass

PAD, START, SPEAK, END, MASK = range(5)
CLAUSES, WORDS = 3, 3
PIVOTS, SOURCE_WORDS = 24, 96
FIRST_PIVOT = 8
FIRST_WORD = FIRST_PIVOT + PIVOTS
FIRST_SYNONYM = FIRST_WORD + SOURCE_WORDS
FIRST_TRANSLATION = FIRST_SYNONYM + 2 * PIVOTS
VOCABULARY = FIRST_TRANSLATION + 2 * SOURCE_WORDS
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Sentence:
    """
    Attributes:
        source, speech (`list[int]`): Token ids.
    """

    source: list[int]
    speech: list[int]

    def row(self) -> dict[str, list[int]]:
        """For the trainer, which learns from the speech only."""
        ids = self.source + self.speech
        return {"input_ids": ids, "loss_mask": [0] * len(self.source) + [1] * len(self.speech)}


def translate(word: int) -> list[int]:
    """One or two tokens: every third word has two."""
    first = FIRST_TRANSLATION + 2 * (word - FIRST_WORD)
    return [first, first + 1] if word % 3 == 0 else [first]


def sentence(share: float, draw: random.Random) -> Sentence:
    """
    Args:
        share (`float`): Chance that a word is the same in both versions of its clause.
        draw (`random.Random`): The source of chance.

    Returns:
        [`Sentence`].
    """
    source, speech = [START], []
    for pivot in draw.sample(range(PIVOTS), CLAUSES):
        first = [draw.randrange(SOURCE_WORDS) for _ in range(WORDS)]
        # The other version's word takes as many tokens, so that the versions differ in nothing but the words.
        second = [
            word if draw.random() < share else (word + 3 * draw.randrange(1, 32)) % SOURCE_WORDS for word in first
        ]
        synonym = draw.randrange(2)
        source += [FIRST_PIVOT + pivot, *(FIRST_WORD + word for word in first + second)]
        speech.append(FIRST_SYNONYM + 2 * pivot + synonym)
        for word in second if synonym else first:
            speech += translate(FIRST_WORD + word)
    return Sentence([*source, SPEAK], [*speech, END])


def sentences(count: int, share: float | None, seed: int) -> list[Sentence]:
    """`count` sentences, of one share or of all of them in turn."""
    draw = random.Random(seed)
    return [sentence(SHARES[i % len(SHARES)] if share is None else share, draw) for i in range(count)]
