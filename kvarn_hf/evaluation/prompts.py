"""Prompts that hide numbers in a long context, and ask for one: line retrieval, and a needle in a haystack."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_ADJECTIVES = """
    amber bold brisk calm clever crisp dusty eager early fancy fierce fond gentle glad golden grand green happy
    humble icy jolly keen kind large late lively lucky mellow mild modest narrow neat noble old pale plain proud
    quick quiet rapid rare ripe rough round royal rusty sharp shy silent silver slow small smooth soft solid stout
    swift tall tender tidy tiny vivid warm wide wild wise young
"""
_NOUNS = """
    acorn anchor apple arrow badger barn basket beacon bell birch boat bridge brook candle canyon castle cedar cloud
    comet copper coral crane creek daisy drum eagle ember falcon feather fern field forest fox garden glacier hammer
    harbor hawk hill island ivy kettle lake lantern leaf lemon maple marble meadow mirror moon oak ocean orchard
    otter owl pebble pine planet raven reef river robin rose saddle shell sparrow spruce star stone stream thistle
    tiger tower tulip valley violin walnut willow wolf
"""

MOST_LINES = len(_ADJECTIVES.split()) * len(_NOUNS.split())


@dataclass(frozen=True)
class Question:
    """A prompt, the ``opening`` of its answer up to the number, and the digits that come next."""

    prompt: str
    opening: str
    answer: str


def line_retrieval(lines: int, samples: int, seed: int) -> list[Question]:
    """Records of ``lines`` lines, each a name and a number of five digits; the number of one line is asked for.

    The task of KVarN, arXiv:2606.03458, and of LongEval before it.
    """
    all_names = [f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
    questions = []
    for sample in range(samples):
        rng = random.Random(f"{seed}/{lines}/{sample}")
        names = rng.sample(all_names, lines)
        numbers = [str(rng.randint(10000, 99999)) for _ in names]
        named = zip(names, numbers, strict=True)
        record = "\n".join(f"line {name}: REGISTER_CONTENT is <{number}>" for name, number in named)
        asked = rng.randrange(lines)
        prompt = (
            f"Each line of this record has a name and a number. Remember the number of every line.\n\n{record}\n\n"
            f"What is the REGISTER_CONTENT of line {names[asked]}?"
        )
        questions.append(Question(prompt, f"line {names[asked]}: REGISTER_CONTENT is <", numbers[asked]))
    return questions


def needle(haystack: str, depths: Sequence[float], samples: int, seed: int) -> list[Question]:
    """A sentence with a number, put between two lines of a text at each of some depths, from 0 (before it) to 1 (behind
    it); ``samples`` questions for each depth."""
    pieces = haystack.splitlines(keepends=True)
    questions = []
    for depth in depths:
        for sample in range(samples):
            rng = random.Random(f"{seed}/{depth}/{sample}")
            city = f"{rng.choice(_ADJECTIVES.split())} {rng.choice(_NOUNS.split())}"
            number = str(rng.randint(10000, 99999))
            place = round(depth * len(pieces))
            sentence = f"The secret number of the {city} is <{number}>.\n"
            text = "".join([*pieces[:place], sentence, *pieces[place:]])
            prompt = (
                f"{text}\n\nSomewhere in the text above a secret number is hidden. What is the number of the {city}?"
            )
            questions.append(Question(prompt, f"The secret number of the {city} is <", number))
    return questions
